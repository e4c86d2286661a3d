"""Memory layouts of matrices in blocks for integer products (`integer_product`); needs no compiler.

A tile is as many outputs as a vector of the processor has lanes. For each block of a tile there are words of four
inputs of each output, and then float16 scales, and for 4 bits minimums.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from sglang_jax.checkpoint.encoding import BLOCK, Q4, Encoding, Stored
from sglang_jax.checkpoint.reader import Array, Role
from sglang_jax.cpu_kernels.block_layout import LARGEST, BlockForm, PackedBlocks, PackedShapes

OF_BLOCK = 3
"""Words of a row of activations for each block: see `integer_tiles.round_row`."""

OUTPUTS_OF_ITEM = 32
"""Rows of the matrix in a work item."""


def pack_for_integers(blocks: Stored, *, outputs: int, zero: int) -> PackedBlocks:
    """Converts blocks of a multiple of `outputs` rows: for each tile and each block, quantised values uint8 `[8,
    outputs, 4]`, four inputs of each output, in 4 bits with groups of four inputs in the low and the high half of a
    byte `[4, outputs, 4]`; 8-bit values with `zero` added. Then float16 `[outputs]` scales, and for 4 bits `[outputs]`
    minimums."""
    values, scales = blocks.arrays[Role.VALUES], [blocks.arrays[Role.SCALES]]
    count = values.shape[1]
    if blocks.encoding == Q4:
        levels = np.concatenate((values & 15, values >> 4), axis=-1)
        scales.append(blocks.arrays[Role.OFFSETS])
    else:
        levels = values.view(np.uint8) + np.uint8(zero)
    tiles = levels.reshape(-1, outputs, count, BLOCK // 4, 4).transpose(0, 2, 3, 1, 4)
    if blocks.encoding == Q4:
        tiles = tiles[:, :, ::2] | tiles[:, :, 1::2] << 4
    of_tiles = np.stack(scales).reshape(len(scales), -1, outputs, count).transpose(1, 3, 0, 2)
    in_order: Array = np.ascontiguousarray(of_tiles)
    return PackedBlocks(np.ascontiguousarray(tiles), in_order)


def rounded_rows(x: Array) -> Array:
    """Rows `[T, inputs]` as integer products round them, float32: the numbers nearest to them of 255 in each block of
    32."""
    parts = x.astype(np.float32).reshape(len(x), -1, BLOCK)
    largest = np.abs(parts).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    found: Array = (np.rint(parts * inverse) * (largest / np.float32(127))).reshape(x.shape)
    return found


def scratch_floats(inputs: int, *, outputs: int) -> int:
    """float32 words of scratch of each thread: rounded rows, their scales, sums of two tiles."""
    return LARGEST * (inputs // 4 + OF_BLOCK * (inputs // BLOCK)) + 2 * LARGEST * outputs


def _shapes(encoding: Encoding, tiles: int, blocks: int, *, outputs: int) -> PackedShapes:
    scales = 2 if encoding == Q4 else 1
    levels = (tiles, blocks, BLOCK * encoding.bits // 32, outputs, 4)
    return (levels, np.dtype(np.uint8)), (tiles, blocks, scales, outputs)


def _form(name: str, outputs: int, zero: int) -> BlockForm:
    return BlockForm(
        name,
        outputs,
        OUTPUTS_OF_ITEM // outputs,
        partial(pack_for_integers, outputs=outputs, zero=zero),
        partial(_shapes, outputs=outputs),
        partial(scratch_floats, outputs=outputs),
        rounded_rows,
        zero,
    )


SIXTEEN_OUTPUTS, EIGHT_OUTPUTS = _form("int8_16", 16, 128), _form("int8_8", 8, 128)
"""For instructions with one unsigned side: 8-bit values have 128 added."""

EIGHT_SIGNED_OUTPUTS = _form("int8_8_signed", 8, 0)
