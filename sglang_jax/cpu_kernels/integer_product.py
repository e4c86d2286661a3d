"""Products of rows, rounded to int8, with a matrix of quantised values in blocks (see `integer_tiles`)."""

from __future__ import annotations

from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.cpu_kernels.block_layout import LARGEST
from sglang_jax.cpu_kernels.block_product import part, rows_of_item, write_tile
from sglang_jax.cpu_kernels.byte_units import UNITS
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.integer_layout import ALL_KINDS, OF_BLOCK, LevelKind
from sglang_jax.cpu_kernels.integer_tiles import multiply_integers, round_row
from sglang_jax.cpu_kernels.language import take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER


def build_integer_product(
    compiler: KernelCompiler, unit: int, kind: LevelKind, gated: bool, width: int, output_width: int
) -> CompiledKernel:
    """Builds the kernel for instructions `byte_units.UNITS[unit]`, matrices of a kind, activations and bias of `width`
    bytes, 2 for bfloat16 and 4 for float32, and outputs of `output_width`. See `block_product.build_block_product`,
    whose fields this takes. Each thread rounds the rows of its items."""
    size, tiles_of_item = UNITS[unit].form.outputs, UNITS[unit].form.tiles
    many, few, one = UNITS[unit].rows
    number = ALL_KINDS.index(kind)
    level_bytes, scale_bytes, with_scales = kind.level_bytes(size), kind.scale_bytes(size), kind.blocks_with_scales
    halves = 2 if gated else 1

    def kernel(work):
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 6]:
            return
        outputs, inputs = work[FIRST_FIELD + 8], work[FIRST_FIELD + 9]
        blocks, tiles = inputs // BLOCK, outputs // size
        items_of_group = (tiles + tiles_of_item - 1) // tiles_of_item
        # The size of `integer_layout.scratch_floats`.
        integers = work[FIRST_FIELD + 5] + slot * 4 * (LARGEST * (inputs // 4 + OF_BLOCK * blocks) + 2 * LARGEST * size)
        of_rows = integers + LARGEST * inputs
        sums = of_rows + LARGEST * blocks * 4 * OF_BLOCK
        rounded = -1
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            group, item = item // items_of_group, item % items_of_group
            rows = rows_of_item(group, work[FIRST_FIELD + 7])
            if rounded != group:
                for row in range(rows):
                    x = work[FIRST_FIELD] + (group * LARGEST + row) * inputs * width
                    own = of_rows + row * blocks * 4 * OF_BLOCK
                    round_row(unit, number, width, x, blocks, integers + row * inputs, own)
                rounded = group
            for tile in range(item * tiles_of_item, min(item * tiles_of_item + tiles_of_item, tiles)):
                for half in range(halves):
                    place = (tile + half * tiles) * blocks
                    levels = work[FIRST_FIELD + 1] + place * level_bytes
                    scales_at = place // with_scales if with_scales else tile + half * tiles
                    scales = work[FIRST_FIELD + 2] + scales_at * scale_bytes
                    into = sums + half * 4 * LARGEST * size
                    row = _multiply(unit, number, many, 0, rows, integers, of_rows, levels, scales, blocks, size, into)
                    row = _multiply(unit, number, few, row, rows, integers, of_rows, levels, scales, blocks, size, into)
                    _multiply(unit, number, one, row, rows, integers, of_rows, levels, scales, blocks, size, into)
                write_tile(work, sums, group, tile, size, gated, width, output_width)

    # In order, because code for one row, for a few and for many must give the same results.
    return compiler(kernel, in_order=True)


@part
def _multiply(unit, number, together, row, rows, integers, of_rows, levels, scales, blocks, size, sums):
    """Multiplies rows from `row` on, as long as there are `together`; returns the first that is left."""
    while row + together <= rows:
        x, own = integers + row * blocks * BLOCK, of_rows + row * blocks * 4 * OF_BLOCK
        multiply_integers(unit, number, together, x, own, levels, scales, blocks, sums + row * 4 * size)
        row += together
    return row
