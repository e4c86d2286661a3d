"""Products of rows, rounded to int8, with a matrix of quantised values in blocks (see `integer_tiles`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from sglang_jax.checkpoint.encoding import BLOCK
from sglang_jax.cpu_kernels.block_layout import INTEGER_OUTPUTS, INTEGER_TILES, LARGEST, OF_BLOCK
from sglang_jax.cpu_kernels.block_product import activated
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.integer_tiles import multiply_integers, round_row
from sglang_jax.cpu_kernels.language import elements, floats, load, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

# Inlined into the kernel, so that formats are constants there.
_part: Callable[[Any], Any] = njit(inline="always")


def build_integer_product(compiler: KernelCompiler, bits: int, gated: bool, width: int = 2) -> CompiledKernel:
    """See `block_product.build_block_product`, whose fields this takes; an item is `INTEGER_TILES` tiles. Each thread
    rounds all rows."""
    level_bytes = INTEGER_OUTPUTS * BLOCK * bits // 8
    scale_bytes = 2 * INTEGER_OUTPUTS * (2 if bits == 4 else 1)
    halves = 2 if gated else 1

    def kernel(work):
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 6]:
            return
        rows, outputs, inputs = work[FIRST_FIELD + 7], work[FIRST_FIELD + 8], work[FIRST_FIELD + 9]
        blocks, tiles = inputs // BLOCK, outputs // INTEGER_OUTPUTS
        # The size of `block_layout.integer_scratch_floats`.
        integers = work[FIRST_FIELD + 5] + slot * 4 * (
            LARGEST * (inputs // 4 + OF_BLOCK * blocks) + 2 * LARGEST * INTEGER_OUTPUTS
        )
        of_rows = integers + LARGEST * inputs
        sums = of_rows + LARGEST * blocks * 4 * OF_BLOCK
        rounded = False
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            if not rounded:
                for row in range(rows):
                    x = work[FIRST_FIELD] + row * inputs * 2
                    round_row(x, blocks, integers + row * inputs, of_rows + row * blocks * 4 * OF_BLOCK)
                rounded = True
            for tile in range(item * INTEGER_TILES, min(item * INTEGER_TILES + INTEGER_TILES, tiles)):
                for half in range(halves):
                    place = (tile + half * tiles) * blocks
                    levels = work[FIRST_FIELD + 1] + place * level_bytes
                    scales = work[FIRST_FIELD + 2] + place * scale_bytes
                    into = sums + half * 4 * LARGEST * INTEGER_OUTPUTS
                    _multiply(bits, rows, integers, of_rows, levels, scales, blocks, into)
                for row in range(rows):
                    output = elements(work[FIRST_FIELD + 4] + (row * outputs + tile * INTEGER_OUTPUTS) * width, width)
                    for i in range(INTEGER_OUTPUTS):
                        total = _total(sums, work[FIRST_FIELD + 3], row, i, tile * INTEGER_OUTPUTS + i)
                        if gated:
                            second = sums + 4 * LARGEST * INTEGER_OUTPUTS
                            up = _total(second, work[FIRST_FIELD + 3], row, i, outputs + tile * INTEGER_OUTPUTS + i)
                            store(output, i, activated(total, work[FIRST_FIELD + 10]))
                            total = load(output, i) * up
                        store(output, i, total)

    return compiler(kernel)


@_part
def _total(sums, bias, row, i, output):
    total = load(floats(sums), row * INTEGER_OUTPUTS + i)
    if bias != 0:
        total += load(elements(bias, 2), output)
    return total


@_part
def _multiply(bits, rows, integers, of_rows, levels, scales, blocks, sums):
    row, row_bytes, scale_bytes = 0, blocks * BLOCK, blocks * 4 * OF_BLOCK
    while row + 8 <= rows:
        x, own = integers + row * row_bytes, of_rows + row * scale_bytes
        multiply_integers(bits, 8, x, own, levels, scales, blocks, sums + row * 4 * INTEGER_OUTPUTS)
        row += 8
    while row + 4 <= rows:
        x, own = integers + row * row_bytes, of_rows + row * scale_bytes
        multiply_integers(bits, 4, x, own, levels, scales, blocks, sums + row * 4 * INTEGER_OUTPUTS)
        row += 4
    while row < rows:
        x, own = integers + row * row_bytes, of_rows + row * scale_bytes
        multiply_integers(bits, 1, x, own, levels, scales, blocks, sums + row * 4 * INTEGER_OUTPUTS)
        row += 1
