"""How a matrix in blocks lies in memory for the kernel of its products (`block_product`); needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.checkpoint.blocks import BLOCK, BlockFormat, Blocks
from sglang_jax.checkpoint.reader import Array

OUTPUTS = 4
"""Rows of the matrix in a tile."""

TILES = 8
"""Tiles in an item of work."""

LARGEST = 64
"""Rows of a call at most."""


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """A matrix, its outputs in tiles of 4.

    - of four bits: levels, 16-bit words `[outputs / 4, blocks, 32]`, of which output j of a tile has bits `4j` to
      `4j + 3`; float16 `[outputs / 4, blocks, 8]`: four scales, four least weights.
    - of eight: int8 `[outputs / 4, blocks, 4, 32]`; scales, float16 `[outputs / 4, blocks, 4]`.
    """

    levels: Array
    scales: Array


def scratch_floats(inputs: int) -> int:
    """float32 words that each thread works in: scales of a tile, its widened weights, sums of two tiles."""
    return inputs // BLOCK * 2 * OUTPUTS + inputs * OUTPUTS // 2 + 2 * LARGEST * OUTPUTS


def pack(blocks: Blocks) -> PackedBlocks:
    """Blocks of a multiple of 4 outputs."""
    return {BlockFormat.FOUR_BITS: _pack_four_bits, BlockFormat.EIGHT_BITS: _pack_eight_bits}[blocks.form](blocks)


def random_blocks(form: BlockFormat, outputs: int, inputs: int) -> Blocks:
    """Any levels, with ordinary scales: what a kernel is tried on."""
    random, shape = np.random.default_rng(0), (outputs, inputs // BLOCK)
    levels = random.integers(0, 256, (*shape, BLOCK * form.value // 8), dtype=np.uint8)
    scales, least = (random.standard_normal(shape).astype(np.float16) / np.float16(2**form.value) for _ in range(2))
    if form is BlockFormat.EIGHT_BITS:
        return Blocks(form, levels.view(np.int8), scales, None)
    return Blocks(form, levels, scales, least)


def _pack_four_bits(blocks: Blocks) -> PackedBlocks:
    assert blocks.least is not None
    outputs, count, half = blocks.levels.shape
    tiles = blocks.levels.reshape(-1, OUTPUTS, count, half)
    words = np.empty((outputs // OUTPUTS, count, 2 * half, 2), np.uint8)
    for byte in range(2):  # of the words, the lower first: two outputs each
        first, second = tiles[:, 2 * byte], tiles[:, 2 * byte + 1]
        words[:, :, :half, byte] = first & 15 | second << 4
        words[:, :, half:, byte] = first >> 4 | second & 0xF0
    scales = np.stack((blocks.scales, blocks.least)).reshape(2, -1, OUTPUTS, count).transpose(1, 3, 0, 2)
    in_order: Array = np.ascontiguousarray(scales)
    # As int16, which every release of torch has, to the same bits.
    levels = words.reshape(*words.shape[:2], -1).view(np.int16)
    return PackedBlocks(levels, in_order.reshape(*in_order.shape[:2], -1))


def _pack_eight_bits(blocks: Blocks) -> PackedBlocks:
    count = blocks.levels.shape[1]
    levels = blocks.levels.reshape(-1, OUTPUTS, count, blocks.levels.shape[2]).transpose(0, 2, 1, 3)
    scales = blocks.scales.reshape(-1, OUTPUTS, count).transpose(0, 2, 1)
    return PackedBlocks(np.ascontiguousarray(levels), np.ascontiguousarray(scales))
