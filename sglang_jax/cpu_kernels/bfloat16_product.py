"""Products of rows of float32 with a matrix `[outputs, inputs]` of bfloat16, as it is stored (see `bfloat16_tiles`)."""

from __future__ import annotations

import numpy as np

from sglang_jax.cpu_kernels.bfloat16_tiles import OUTPUTS, FloatVectors, multiply_weights, widen_weights
from sglang_jax.cpu_kernels.block_layout import LARGEST
from sglang_jax.cpu_kernels.block_product import part, rows_of_item, write_outputs
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import elements, load, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

TILES = 8
"""Tiles of a work item."""

_CHUNK = 1024
"""Inputs for which a tile is widened at once. With some rows of activations, they fit into the first cache."""

_AHEAD = 8192
"""Bytes of weights that are prefetched at least, about: whole tiles."""


def scratch_floats(vectors: FloatVectors) -> int:
    """float32 words of scratch of each thread: widened weights, sums by lane, sums of two tiles, and the last inputs of
    all rows and of a tile, if they fill no block."""
    totals = LARGEST * OUTPUTS * vectors.lanes
    return _CHUNK * OUTPUTS + totals + 2 * LARGEST * OUTPUTS + (LARGEST + OUTPUTS) * vectors.block


def items_of(rows: int, outputs: int) -> int:
    """Work items of a product."""
    return -(-rows // LARGEST) * -(-outputs // (OUTPUTS * TILES))


def build_bfloat16_product(compiler: KernelCompiler, vectors: FloatVectors) -> CompiledKernel:
    """Builds the kernel for a matrix of at least `OUTPUTS` outputs. It takes the fields of `block_product.FIELDS`, with
    0 as activation of a product that is not gated. x, bias and output are float32, and there are no scales. An item is
    `TILES` tiles for at most `LARGEST` rows."""
    size, block, most, few = vectors.lanes, vectors.block, vectors.rows, vectors.few

    def kernel(work):
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 6]:
            return
        outputs, inputs = work[FIRST_FIELD + 8], work[FIRST_FIELD + 9]
        tiles = (outputs + OUTPUTS - 1) // OUTPUTS
        items_of_group = (tiles + TILES - 1) // TILES
        # The parts and the size of `scratch_floats`.
        of_totals, of_sums, of_ends = LARGEST * OUTPUTS * size, LARGEST * OUTPUTS, LARGEST * block
        scratch = work[FIRST_FIELD + 5] + slot * 4 * (
            _CHUNK * OUTPUTS + of_totals + 2 * of_sums + of_ends + OUTPUTS * block
        )
        totals = scratch + 4 * _CHUNK * OUTPUTS
        sums = totals + 4 * of_totals
        last_x = sums + 4 * 2 * of_sums
        last_weights = last_x + 4 * of_ends
        gated, left = work[FIRST_FIELD + 10] != 0, inputs % block
        in_place = not gated and work[FIRST_FIELD + 3] == 0
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            group, item = item // items_of_group, item % items_of_group
            rows = rows_of_item(group, work[FIRST_FIELD + 7])
            x = work[FIRST_FIELD] + group * LARGEST * inputs * 4
            _copy_ends(rows, x + 4 * (inputs - left), inputs * 4, last_x, block, left, 4)
            for tile in range(item * TILES, min(item * TILES + TILES, tiles)):
                # A last tile that is not full repeats outputs of the one before.
                first = min(tile * OUTPUTS, outputs - OUTPUTS)
                into, gap = sums, 4 * OUTPUTS
                if in_place:
                    into, gap = work[FIRST_FIELD + 4] + 4 * (group * LARGEST * outputs + first), 4 * outputs
                for half in range(2 if gated else 1):
                    weights = work[FIRST_FIELD + 1] + (half * outputs + first) * 2 * inputs
                    last = weights + 2 * (inputs - left)
                    _copy_ends(OUTPUTS, last, 2 * inputs, last_weights, block, left, 2)
                    own = into + half * 4 * of_sums
                    if rows <= 2 * few:
                        _few_rows(size, few, rows, inputs, x, weights, last_x, last_weights, totals, own, gap)
                    else:
                        _many_rows(
                            size, most, few, rows, inputs, x, weights, last_x, last_weights, scratch, totals, own, gap
                        )
                if gated:
                    write_outputs(work, sums, group, first, OUTPUTS, True, 4, 4)
                elif not in_place:
                    write_outputs(work, sums, group, first, OUTPUTS, False, 4, 4)

    return compiler(kernel)


@part
def _copy_ends(rows, source, stride, target, block, left, width):
    """Copies the last `left` inputs of rows, `width` bytes each, to a block of each row, with zeros behind them."""
    if left > 0:
        for row in range(rows):
            found, into = elements(source + row * stride, width), elements(target + row * block * width, width)
            for at in range(block):
                store(into, at, load(found, at) if at < left else np.float32(0))


@part
def _few_rows(size, few, rows, inputs, x, weights, last_x, last_weights, totals, sums, gap):
    """Writes the products of rows with a tile: weights are widened in registers."""
    block, step = 2 * size, 2 * inputs
    ahead = weights + _distance(inputs)
    no_more = inputs % block == 0
    _some(size, few, 16, rows, inputs // block, x, 4 * inputs, weights, step, ahead, 1, no_more, totals, sums, gap)
    if not no_more:
        x, weights = last_x, last_weights
        _some(size, few, 16, rows, 1, x, 4 * block, weights, 2 * block, weights, 0, 1, totals, sums, gap)


@part
def _many_rows(size, most, few, rows, inputs, x, weights, last_x, last_weights, widened, totals, sums, gap):
    """Writes the products of rows with a tile: weights are first widened, some inputs at a time."""
    block, step = 2 * size, 2 * inputs
    ahead, full = weights + _distance(inputs), inputs // block * block
    for at in range(0, full, _CHUNK):
        blocks = min(_CHUNK, full - at) // block
        widen_weights(size, blocks, weights + 2 * at, step, ahead + 2 * OUTPUTS * at, widened)
        begins, ends = at == 0, at + blocks * block == inputs
        _all(size, most, few, rows, blocks, x + 4 * at, 4 * inputs, widened, begins, ends, totals, sums, gap)
    if full < inputs:
        widen_weights(size, 1, last_weights, 2 * block, last_weights, widened)
        _all(size, most, few, rows, 1, last_x, 4 * block, widened, full == 0, 1, totals, sums, gap)


@part
def _distance(inputs):
    """How far ahead weights are prefetched: whole tiles, whose bytes are read in another order than they lie."""
    tile = 2 * OUTPUTS * inputs
    return (_AHEAD // tile + 1) * tile


@part
def _all(size, most, few, rows, blocks, x, stride, weights, begins, ends, totals, sums, gap):
    # A single row takes as long as two, because its sums wait for each other.
    last = rows - most if rows % most == 1 else rows
    row = _rows(size, most, 32, 0, last, blocks, x, stride, weights, 0, 0, begins, ends, totals, sums, gap)
    x, totals, sums = x + row * stride, totals + row * 4 * OUTPUTS * size, sums + row * gap
    _some(size, few, 32, rows - row, blocks, x, stride, weights, 0, 0, begins, ends, totals, sums, gap)


@part
def _some(size, few, bits, rows, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap):
    row = _rows(size, few, bits, 0, rows, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap)
    row = _rows(size, 2, bits, row, rows, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap)
    _rows(size, 1, bits, row, rows, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap)


@part
def _rows(size, together, bits, row, rows, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap):
    """Multiplies rows from `row` on, as long as there are `together`; returns the first that is left."""
    while row + together <= rows:
        own, into = totals + row * 4 * OUTPUTS * size, sums + row * gap
        multiply_weights(
            size, together, bits, blocks, x + row * stride, stride, weights, step, ahead, begins, ends, own, into, gap
        )
        row += together
    return row
