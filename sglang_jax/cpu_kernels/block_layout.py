"""The memory layout of a matrix in blocks for the kernel of its products (`block_product`); needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_jax.checkpoint.encoding import BLOCK, Q4, Q8, Encoding, Stored
from sglang_jax.checkpoint.reader import Array, Role

OUTPUTS = 4
"""Rows of the matrix in a tile."""

TILES = 8
"""Tiles in a work item."""

LARGEST = 64
"""Maximum rows of activations of an item."""


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A matrix, with its outputs in tiles of 4. Four bits: quantised values, 16-bit words `[outputs / 4, blocks, 32]`,
    of which output j of a tile has bits `4j` to `4j + 3`, and float16 `[outputs / 4, blocks, 8]`: four scales, four
    minimums. Eight bits: int8 `[outputs / 4, blocks, 4, 32]`, and scales, float16 `[outputs / 4, blocks, 4]`."""

    levels: Array
    scales: Array


def scratch_floats(inputs: int) -> int:
    """float32 words of scratch of each thread: scales of a tile, its widened weights, sums of two tiles."""
    return inputs // BLOCK * 2 * OUTPUTS + inputs * OUTPUTS // 2 + 2 * LARGEST * OUTPUTS


def pack(blocks: Stored) -> PackedBlocks:
    """Converts blocks of a multiple of 4 outputs."""
    return {Q4: _pack_four_bits, Q8: _pack_eight_bits}[blocks.encoding](blocks)


def with_zeros(rows: int, array: Array) -> Array:
    """An array with `rows` rows of zeros behind its own."""
    return np.concatenate((array, np.zeros((rows, *array.shape[1:]), array.dtype))) if rows else array


def random_blocks(encoding: Encoding, outputs: int, inputs: int) -> Stored:
    """Random values with ordinary scales, to test kernels."""
    random, shape = np.random.default_rng(0), (outputs, inputs // BLOCK)
    values = random.integers(0, 256, (*shape, BLOCK * encoding.bits // 8), dtype=np.uint8)
    levels = 2**encoding.bits
    scales, offsets = (random.standard_normal(shape).astype(np.float16) / np.float16(levels) for _ in range(2))
    arrays = {Role.VALUES: values if encoding.offsets else values.view(np.int8), Role.SCALES: scales}
    if encoding.offsets:
        arrays[Role.OFFSETS] = offsets
    return Stored(encoding, arrays)


def _exact_shapes(encoding: Encoding, tiles: int, blocks: int) -> PackedShapes:
    if encoding == Q4:
        return ((tiles, blocks, BLOCK), np.dtype(np.int16)), (tiles, blocks, 2 * OUTPUTS)
    return ((tiles, blocks, OUTPUTS, BLOCK), np.dtype(np.int8)), (tiles, blocks, OUTPUTS)


PackedShapes = tuple[tuple[tuple[int, ...], np.dtype[Any]], tuple[int, ...]]
"""Shape and dtype of quantised values, and the shape of scales."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A kind of products with matrices in blocks, and their layout.

    - `outputs`: rows of the matrix in a tile. `tiles`: tiles in a work item.
    - `pack`: converts blocks of a multiple of `outputs` rows. `shapes`: of the result, by encoding, tiles and blocks.
    - `scratch_floats`: float32 words of scratch of each thread, by the number of inputs.
    - `rounded`: rows, as they are multiplied.
    - `zero`: added to stored 8-bit values.
    """

    name: str
    outputs: int
    tiles: int
    pack: Callable[[Stored], PackedBlocks]
    shapes: Callable[[Encoding, int, int], PackedShapes]
    scratch_floats: Callable[[int], int]
    rounded: Callable[[Array], Array]
    zero: int = 0

    def items(self, rows: int, outputs: int) -> int:
        """Work items of a product."""
        return -(-rows // LARGEST) * -(-outputs // (self.outputs * self.tiles))


def _pack_four_bits(blocks: Stored) -> PackedBlocks:
    values = blocks.arrays[Role.VALUES]
    outputs, count, half = values.shape
    tiles = values.reshape(-1, OUTPUTS, count, half)
    words = np.empty((outputs // OUTPUTS, count, 2 * half, 2), np.uint8)
    for byte in range(2):  # of the words, lower byte first: two outputs each
        first, second = tiles[:, 2 * byte], tiles[:, 2 * byte + 1]
        words[:, :, :half, byte] = first & 15 | second << 4
        words[:, :, half:, byte] = first >> 4 | second & 0xF0
    of_blocks = np.stack((blocks.arrays[Role.SCALES], blocks.arrays[Role.OFFSETS]))
    scales = of_blocks.reshape(2, -1, OUTPUTS, count).transpose(1, 3, 0, 2)
    in_order: Array = np.ascontiguousarray(scales)
    # As int16 with the same bits, because older versions of torch have no uint16.
    levels = words.reshape(*words.shape[:2], -1).view(np.int16)
    return PackedBlocks(levels, in_order.reshape(*in_order.shape[:2], -1))


def _pack_eight_bits(blocks: Stored) -> PackedBlocks:
    values = blocks.arrays[Role.VALUES]
    count = values.shape[1]
    levels = values.reshape(-1, OUTPUTS, count, values.shape[2]).transpose(0, 2, 1, 3)
    scales = blocks.arrays[Role.SCALES].reshape(-1, OUTPUTS, count).transpose(0, 2, 1)
    return PackedBlocks(np.ascontiguousarray(levels), np.ascontiguousarray(scales))


def _as_they_are(x: Array) -> Array:
    return x


EXACT = BlockForm("exact", OUTPUTS, TILES, pack, _exact_shapes, scratch_floats, _as_they_are)
"""Rows of bfloat16, and weights rounded to bfloat16."""
