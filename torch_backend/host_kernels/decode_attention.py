"""Attention of single queries over paged keys and values, all query heads of a kv head together.

Keys are gone through in blocks with an online softmax (Milakov and Gimelshein 2018), so that the scratch memory of a
thread does not grow with the length. A row's result does not depend on the other rows.
"""

from __future__ import annotations

import math

import numpy as np

from torch_backend.host_kernels.compiling import CompiledKernel, KernelCompiler
from torch_backend.host_kernels.language import elements, exponential, float_field, floats, integers, load, store, take
from torch_backend.host_kernels.team import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

FIELDS = "qqqqqqqqqqqqqdd"
"""Addresses of queries, key pages, value pages, output, page table, lengths, sinks (0 for none) and scratch; slots of
that; columns of the page table, kv heads, page size, window (0 for none); scale, soft cap (0 for none).

An item is a kv head of a row."""

_BLOCK = 256
"""Keys whose scores are held at once."""


def scratch_floats(head_dim: int, group: int) -> int:
    """float32 words that each thread works in: scores, sums, queries, largest scores and sums of weights."""
    return group * (_BLOCK + 2 * head_dim + 2)


def build_decode_attention(compiler: KernelCompiler, width: int, head_dim: int, group: int) -> CompiledKernel:
    """For elements of `width` bytes, heads of `head_dim` and `group` query heads to a kv head."""
    head_bytes = head_dim * width
    sums_at = group * _BLOCK
    queries_at = sums_at + group * head_dim
    largest_at = queries_at + group * head_dim
    weights_at = largest_at + group
    scratch_bytes = 4 * (weights_at + group)
    block = _BLOCK

    def kernel(work):
        lens = integers(work[FIRST_FIELD + 5])
        columns, kv_heads = work[FIRST_FIELD + 9], work[FIRST_FIELD + 10]
        page_size, window = work[FIRST_FIELD + 11], work[FIRST_FIELD + 12]
        scale, soft_cap = float_field(work, FIRST_FIELD + 13), float_field(work, FIRST_FIELD + 14)
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 8]:
            return
        scores = floats(work[FIRST_FIELD + 7] + slot * scratch_bytes)
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            row, kv_head = item // kv_heads, item % kv_heads
            length = load(lens, row)
            source = elements(work[FIRST_FIELD] + item * group * head_bytes, width)
            output = elements(work[FIRST_FIELD + 3] + item * group * head_bytes, width)
            if length == 0:
                for i in range(group * head_dim):
                    store(output, i, np.float32(0))
                continue
            pages = integers(work[FIRST_FIELD + 4] + row * columns * 4)
            for i in range(group * head_dim):
                store(scores, queries_at + i, load(source, i) * scale)
                store(scores, sums_at + i, np.float32(0))
            for query in range(group):
                # A sink is a key that has no value.
                if work[FIRST_FIELD + 6] != 0:
                    sink = load(floats(work[FIRST_FIELD + 6]), kv_head * group + query)
                    store(scores, largest_at + query, sink)
                    store(scores, weights_at + query, np.float32(1))
                else:
                    store(scores, largest_at + query, np.float32(-np.inf))
                    store(scores, weights_at + query, np.float32(0))
            first = max(length - window, 0) if window > 0 else 0
            while first < length:
                count = min(block, length - first)

                done = 0
                while done < count:
                    column, offset = (first + done) // page_size, (first + done) % page_size
                    run = min(page_size - offset, count - done)
                    place = (load(pages, column) * kv_heads + kv_head) * page_size + offset
                    keys = elements(work[FIRST_FIELD + 1] + place * head_bytes, width)
                    for key in range(run):
                        for query in range(group):
                            score = np.float32(0)
                            for i in range(head_dim):
                                of_query = load(scores, queries_at + query * head_dim + i)
                                score += of_query * load(keys, key * head_dim + i)
                            store(scores, query * block + done + key, score)
                    done += run

                for query in range(group):
                    start = query * block
                    if soft_cap > 0:
                        for i in range(start, start + count):
                            store(scores, i, soft_cap * np.float32(math.tanh(load(scores, i) / soft_cap)))
                    before = load(scores, largest_at + query)
                    largest = before
                    for i in range(start, start + count):
                        largest = max(largest, load(scores, i))
                    weights = np.float32(0)
                    for i in range(start, start + count):
                        weight = exponential(load(scores, i) - largest)
                        store(scores, i, weight)
                        weights += weight
                    fading = exponential(before - largest)
                    store(scores, largest_at + query, largest)
                    store(scores, weights_at + query, load(scores, weights_at + query) * fading + weights)
                    for i in range(sums_at + query * head_dim, sums_at + (query + 1) * head_dim):
                        store(scores, i, load(scores, i) * fading)

                done = 0
                while done < count:
                    column, offset = (first + done) // page_size, (first + done) % page_size
                    run = min(page_size - offset, count - done)
                    place = (load(pages, column) * kv_heads + kv_head) * page_size + offset
                    values = elements(work[FIRST_FIELD + 2] + place * head_bytes, width)
                    key = 0
                    while key + 4 <= run:
                        for query in range(group):
                            at = query * block + done + key
                            w0, w1, w2, w3 = (
                                load(scores, at),
                                load(scores, at + 1),
                                load(scores, at + 2),
                                load(scores, at + 3),
                            )
                            for i in range(head_dim):
                                j = key * head_dim + i
                                total = sums_at + query * head_dim + i
                                near = w0 * load(values, j) + w1 * load(values, j + head_dim)
                                far = w2 * load(values, j + 2 * head_dim) + w3 * load(values, j + 3 * head_dim)
                                store(scores, total, load(scores, total) + (near + far))
                        key += 4
                    while key < run:
                        for query in range(group):
                            weight = load(scores, query * block + done + key)
                            for i in range(head_dim):
                                total = sums_at + query * head_dim + i
                                store(scores, total, load(scores, total) + weight * load(values, key * head_dim + i))
                        key += 1
                    done += run
                first += count
            for query in range(group):
                whole = np.float32(1) / load(scores, weights_at + query)
                for i in range(query * head_dim, (query + 1) * head_dim):
                    store(output, i, load(scores, sums_at + i) * whole)

    return compiler(kernel)
