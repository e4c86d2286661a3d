"""RMS norm (Zhang and Sennrich 2019), optionally after adding to the residual stream."""

from __future__ import annotations

import math

import numpy as np

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import elements, float_field, load, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS

FIELDS = "qqqqqqd"
"""Addresses of x, residual (0 for none), weight and output; rows, hidden; eps. An item is `ROWS` rows."""

ROWS = 4


def build_rms_norm(compiler: KernelCompiler, width: int) -> CompiledKernel:
    """Builds the kernel for elements of `width` bytes. It writes `x + residual` to residual if there is one, and the
    norm of the sum, or of x, to output."""

    def kernel(work):
        address, residual_address = work[FIRST_FIELD], work[FIRST_FIELD + 1]
        weight = elements(work[FIRST_FIELD + 2], width)
        output_address = work[FIRST_FIELD + 3]
        rows, hidden = work[FIRST_FIELD + 4], work[FIRST_FIELD + 5]
        eps = float_field(work, FIRST_FIELD + 6)
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            for row in range(item * ROWS, min(item * ROWS + ROWS, rows)):
                start = row * hidden * width
                x = elements(address + start, width)
                output = elements(output_address + start, width)
                squares = np.float32(0)
                if residual_address != 0:
                    total = elements(residual_address + start, width)
                    for i in range(hidden):
                        store(total, i, load(total, i) + load(x, i))
                else:
                    total = x
                for i in range(hidden):
                    value = load(total, i)
                    squares += value * value
                scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(hidden) + eps))
                for i in range(hidden):
                    store(output, i, load(total, i) * scale * load(weight, i))

    return compiler(kernel)
