"""Products of rows with a matrix of quantised values in blocks (see `block_tiles`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.cpu_kernels.block_layout import LARGEST, OUTPUTS, TILES
from sglang_jax.cpu_kernels.block_tiles import FEW_ROWS, MAX_ROWS, multiply_tile, widen_halves, widen_tile
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import elements, exponential, floats, load, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

FIELDS = "qqqqqqqqqqqq"
"""Addresses of x, quantised values, scales, bias (0 for none), output and scratch; slots of scratch; rows, outputs,
inputs; activation of a gated product; elements from one row of the output to the next. An item is `TILES` tiles, for at
most `LARGEST` rows (`BlockForm.items`). The matrix of a gated product is gate, then up, each with `outputs` outputs."""

SILU, GELU_TANH = 1, 2
"""Activations of gated products."""

# The functions below are inlined into the kernel, so that formats are constants there.
part: Callable[[Any], Any] = njit(inline="always")


def build_block_product(compiler: KernelCompiler, bits: int, gated: bool, width: int = 2) -> CompiledKernel:
    """Builds the kernel for values of `bits` bits, 4 or 8, and outputs of `width` bytes: 2 for bfloat16, 4 for float32.
    A gated product is `activation(gate) * up`, each rounded once."""
    numbers = {4: 2 * OUTPUTS, 8: OUTPUTS}[bits]
    level_bytes = OUTPUTS * BLOCK * bits // 8
    halves = 2 if gated else 1

    def kernel(work):
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 6]:
            return
        outputs, inputs = work[FIRST_FIELD + 8], work[FIRST_FIELD + 9]
        blocks, tiles = inputs // BLOCK, outputs // OUTPUTS
        items_of_group = (tiles + TILES - 1) // TILES
        # The size of `scratch_floats`.
        scratch = work[FIRST_FIELD + 5] + slot * 4 * (
            blocks * 2 * OUTPUTS + inputs * OUTPUTS // 2 + 2 * LARGEST * OUTPUTS
        )
        weights = scratch + 4 * blocks * 2 * OUTPUTS
        sums = weights + 2 * inputs * OUTPUTS
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            group, item = item // items_of_group, item % items_of_group
            rows = rows_of_item(group, work[FIRST_FIELD + 7])
            x = work[FIRST_FIELD] + group * LARGEST * inputs * 2
            for tile in range(item * TILES, min(item * TILES + TILES, tiles)):
                for half in range(halves):
                    place = (tile + half * tiles) * blocks
                    widen_halves(work[FIRST_FIELD + 2] + place * numbers * 2, scratch, blocks * numbers)
                    levels = work[FIRST_FIELD + 1] + place * level_bytes
                    into = sums + half * 4 * LARGEST * OUTPUTS
                    if rows <= FEW_ROWS:
                        _multiply_few(bits, rows, x, inputs * 2, levels, scratch, blocks, into)
                    else:
                        widen_tile(bits, levels, scratch, blocks, weights)
                        _multiply_many(rows, x, inputs * 2, weights, blocks, into)
                write_tile(work, sums, group, tile, OUTPUTS, gated, 2, width)

    return compiler(kernel)


@part
def rows_of_item(group, rows):
    """The number of rows of a group."""
    return min(LARGEST, rows - group * LARGEST)


@part
def write_tile(work, sums, group, tile, size, gated, width, output_width):
    """See `write_outputs`; tiles have `size` outputs."""
    write_outputs(work, sums, group, tile * size, size, gated, width, output_width)


@part
def write_outputs(work, sums, group, start, size, gated, width, output_width):
    """Writes sums `[LARGEST, size]` of a group of rows and of `size` outputs from `start` on, and their bias of `width`
    bytes, as outputs of `output_width` bytes. If `gated`, they are those of the gate; those of up, in as much memory,
    lie behind them."""
    outputs, bias, stride = work[FIRST_FIELD + 8], work[FIRST_FIELD + 3], work[FIRST_FIELD + 11]
    first = work[FIRST_FIELD + 4] + group * LARGEST * stride * output_width
    for row in range(rows_of_item(group, work[FIRST_FIELD + 7])):
        output = elements(first + (row * stride + start) * output_width, output_width)
        for i in range(size):
            total = _total(sums, bias, row * size + i, start + i, width)
            if gated:
                up = _total(sums + 4 * LARGEST * size, bias, row * size + i, outputs + start + i, width)
                store(output, i, activated(total, work[FIRST_FIELD + 10]))
                total = load(output, i) * up
            store(output, i, total)


@part
def _total(sums, bias, place, output, width):
    total = load(floats(sums), place)
    if bias != 0:
        total += load(elements(bias, width), output)
    return total


@part
def activated(x, activation):
    """x times its logistic, or, for the tanh approximation of GELU, that of a polynomial of x."""
    inner = x
    if activation == GELU_TANH:
        inner = np.float32(1.5957691216057308) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exponential(-inner))


@part
def _multiply_few(bits, rows, x, stride, levels, scales, blocks, sums):
    if rows == 1:
        multiply_tile(bits, 1, x, stride, levels, scales, blocks, sums)
    elif rows == 2:
        multiply_tile(bits, 2, x, stride, levels, scales, blocks, sums)
    elif rows == 3:
        multiply_tile(bits, 3, x, stride, levels, scales, blocks, sums)
    else:
        multiply_tile(bits, 4, x, stride, levels, scales, blocks, sums)


@part
def _multiply_many(rows, x, stride, weights, blocks, sums):
    row = 0
    while row + MAX_ROWS <= rows:
        multiply_tile(16, 6, x + row * stride, stride, weights, weights, blocks, sums + row * 4 * OUTPUTS)
        row += MAX_ROWS
    if row + 4 <= rows:
        multiply_tile(16, 4, x + row * stride, stride, weights, weights, blocks, sums + row * 4 * OUTPUTS)
        row += 4
    while row < rows:
        multiply_tile(16, 1, x + row * stride, stride, weights, weights, blocks, sums + row * 4 * OUTPUTS)
        row += 1
