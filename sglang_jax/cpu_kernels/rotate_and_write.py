"""Normalises and rotates queries and keys, and writes keys and values to their pages, in one pass over qkv."""

from __future__ import annotations

import math

import numpy as np

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import elements, float_field, floats, load, long_integers, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS

FIELDS = "qqqqqqqqqqqqd"
"""Addresses of qkv, cosines, sines, queries (output), key pages, value pages, slots, norm weights of queries and of
keys (0 for none); heads, kv heads, page size; eps. An item is a token."""


def build_rotate_and_write(compiler: KernelCompiler, width: int, head_dim: int) -> CompiledKernel:
    """Builds the kernel for elements of `width` bytes and heads of `head_dim`, an even number."""
    half = head_dim // 2
    head_bytes = head_dim * width

    def kernel(work):
        heads, kv_heads, page_size = work[FIRST_FIELD + 9], work[FIRST_FIELD + 10], work[FIRST_FIELD + 11]
        eps = float_field(work, FIRST_FIELD + 12)
        while True:
            token = take(work, ITEM_COUNTER)
            if token >= work[ITEMS]:
                return
            cosines = floats(work[FIRST_FIELD + 1] + token * half * 4)
            sines = floats(work[FIRST_FIELD + 2] + token * half * 4)
            slot = load(long_integers(work[FIRST_FIELD + 6]), token)
            page, offset = slot // page_size, slot % page_size
            first = work[FIRST_FIELD] + token * (heads + 2 * kv_heads) * head_bytes
            for head in range(heads + kv_heads):
                source = elements(first + head * head_bytes, width)
                if head < heads:
                    target_address = work[FIRST_FIELD + 3] + (token * heads + head) * head_bytes
                    weight_address = work[FIRST_FIELD + 7]
                else:
                    run = (page * kv_heads + head - heads) * page_size + offset
                    target_address = work[FIRST_FIELD + 4] + run * head_bytes
                    weight_address = work[FIRST_FIELD + 8]
                target = elements(target_address, width)
                if weight_address == 0:
                    for i in range(half):
                        low, high = load(source, i), load(source, i + half)
                        cosine, sine = load(cosines, i), load(sines, i)
                        store(target, i, low * cosine - high * sine)
                        store(target, i + half, high * cosine + low * sine)
                else:
                    weight = elements(weight_address, width)
                    squares = np.float32(0)
                    for i in range(head_dim):
                        squares += load(source, i) * load(source, i)
                    scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(head_dim) + eps))
                    for i in range(half):
                        low = load(source, i) * scale * load(weight, i)
                        high = load(source, i + half) * scale * load(weight, i + half)
                        cosine, sine = load(cosines, i), load(sines, i)
                        store(target, i, low * cosine - high * sine)
                        store(target, i + half, high * cosine + low * sine)
            for head in range(kv_heads):
                source = elements(first + (heads + kv_heads + head) * head_bytes, width)
                run = (page * kv_heads + head) * page_size + offset
                target = elements(work[FIRST_FIELD + 5] + run * head_bytes, width)
                for i in range(head_dim):
                    store(target, i, load(source, i))

    return compiler(kernel)
