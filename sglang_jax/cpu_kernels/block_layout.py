"""The memory layout of a matrix in blocks for the kernel of its products (`block_product`); needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_jax.checkpoint.encoding import AnyValues, Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BLOCK, WITH_EXACT_ACTIVATIONS, BlockType, Unpacked
from sglang_jax.checkpoint.group_blocks import GroupType, Scales
from sglang_jax.checkpoint.reader import Array, Role
from sglang_jax.errors import CheckpointError

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


def blocks_of(stored: Stored) -> Unpacked:
    """The blocks of a matrix, unpacked; or int8 values with a scale per row."""
    if stored.encoding.block is None:
        values = stored.arrays[Role.VALUES]
        return Unpacked(values.reshape(len(values), -1, BLOCK), 0, stored.arrays[Role.SCALES][:, None])
    return stored.encoding.block_type.unpack(stored.arrays[Role.VALUES])


def pack(stored: Stored) -> PackedBlocks:
    """Converts blocks of a multiple of 4 outputs. Raises `CheckpointError` for a scale of Q4_0 so large that its
    product with -8 is infinite in float16."""
    blocks = blocks_of(stored)
    return _pack_eight_bits(blocks) if stored.encoding.values is BlockType.Q8_0 else _pack_four_bits(blocks)


def with_zeros(rows: int, array: Array) -> Array:
    """An array with `rows` rows of zeros behind its own."""
    return np.concatenate((array, np.zeros((rows, *array.shape[1:]), array.dtype))) if rows else array


def random_blocks(encoding: Encoding, outputs: int, inputs: int) -> Stored:
    """Random values with ordinary scales, to test kernels; `inputs`, a multiple of 32, are rounded up to whole
    blocks."""
    if encoding.block is None:
        random = np.random.default_rng(0)
        values = random.integers(-127, 128, (outputs, inputs)).astype(np.int8)
        return Stored(
            encoding, {Role.VALUES: values, Role.SCALES: random.uniform(0, 1 / 64, outputs).astype(np.float32)}
        )
    kind = encoding.block_type
    random, shape = np.random.default_rng(0), (outputs, -(-inputs // kind.weights))
    if isinstance(kind, GroupType):
        return Stored(encoding, {Role.VALUES: _random_groups(kind, shape, random)})
    values = random.integers(0, 256, (*shape, kind.nbytes), dtype=np.uint8)
    if kind is BlockType.MXFP4:
        values[..., 0] = random.integers(122, 127, shape)  # exponents, of which 127 is 0
    for first in kind.halves:
        halves = (random.standard_normal(shape) / _SPREAD[kind]).astype(np.float16)
        values[..., first : first + 2] = halves[..., None].view(np.uint8)
    return Stored(encoding, {Role.VALUES: values})


def _random_groups(kind: GroupType, shape: tuple[int, int], random: np.random.Generator) -> Array:
    low, high = (0, 16) if kind.levels.bits == 4 else (-127, 128)
    levels = random.integers(low, high, (shape[0], shape[1] * kind.weights)).astype(kind.levels.dtype)
    zeros = random.integers(low, high, shape).astype(kind.levels.dtype) if kind.zeros else None
    scales = random.standard_normal(shape) / (high - low)
    if kind.scales is Scales.POWER_OF_TWO:
        scales = np.exp2(np.rint(np.log2(np.abs(scales))))
    return kind.join(levels, scales, zeros)


_SPREAD = {
    BlockType.Q4_0: 16,
    BlockType.Q4_1: 16,
    BlockType.Q5_0: 32,
    BlockType.Q5_1: 32,
    BlockType.Q8_0: 256,
    BlockType.Q4_K: 1024,
    BlockType.Q5_K: 2048,
    BlockType.Q6_K: 8192,
}
"""By which random scales are divided, so that weights are about 1."""


def _exact_shapes(encoding: Encoding, tiles: int, blocks: int) -> PackedShapes:
    half = np.dtype(np.float16)
    if encoding.values is BlockType.Q8_0:
        return ((tiles, blocks, OUTPUTS, BLOCK), np.dtype(np.int8)), ((tiles, blocks, OUTPUTS), half)
    return ((tiles, blocks, BLOCK), np.dtype(np.int16)), ((tiles, blocks, 2 * OUTPUTS), half)


PackedShape = tuple[tuple[int, ...], np.dtype[Any]]
PackedShapes = tuple[PackedShape, PackedShape]
"""Shapes and dtypes of quantised values and of scales."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A kind of products with matrices in blocks, and their layout.

    - `outputs`: rows of the matrix in a tile. `tiles`: tiles in a work item.
    - `serves`: whether there is a kernel for a type of matrices.
    - `pack`: converts blocks of a multiple of `outputs` rows. `shapes`: of the result, by encoding, tiles, and inputs
      divided by 32.
    - `scratch_floats`: float32 words of scratch of each thread, by the number of inputs.
    - `rounded`: rows, as they are multiplied.
    - `zero`: added to stored 8-bit values.
    """

    name: str
    outputs: int
    tiles: int
    serves: Callable[[AnyValues], bool]
    pack: Callable[[Stored], PackedBlocks]
    shapes: Callable[[Encoding, int, int], PackedShapes]
    scratch_floats: Callable[[int], int]
    rounded: Callable[[Array], Array]
    zero: int = 0

    def items(self, rows: int, outputs: int) -> int:
        """Work items of a product."""
        return -(-rows // LARGEST) * -(-outputs // (self.outputs * self.tiles))


def _pack_four_bits(blocks: Unpacked) -> PackedBlocks:
    outputs, count, _ = blocks.levels.shape
    tiles = blocks.levels.reshape(-1, OUTPUTS, count, BLOCK)
    words = np.empty((outputs // OUTPUTS, count, BLOCK, 2), np.uint8)
    for byte in range(2):  # of the words, lower byte first: two outputs each
        words[..., byte] = tiles[:, 2 * byte] | tiles[:, 2 * byte + 1] << 4
    of_blocks = np.stack((blocks.scales, _offsets(blocks)))
    scales = of_blocks.reshape(2, -1, OUTPUTS, count).transpose(1, 3, 0, 2)
    in_order: Array = np.ascontiguousarray(scales)
    # As int16 with the same bits, because older versions of torch have no uint16.
    levels = words.reshape(*words.shape[:2], -1).view(np.int16)
    return PackedBlocks(levels, in_order.reshape(*in_order.shape[:2], -1))


def _offsets(blocks: Unpacked) -> Array:
    if blocks.offsets is not None:
        return blocks.offsets
    with np.errstate(over="ignore"):
        offsets: Array = blocks.scales * np.float16(-blocks.zero)
    if not np.isfinite(offsets).all():
        largest = np.abs(blocks.scales.astype(np.float32)).max()
        raise CheckpointError(
            f"a matrix in blocks of type Q4_0 has the scale {largest:g}, and kernels with exact activations hold at "
            "most 8188: choose cpu_activations int8, or leave keep_gguf_blocks"
        )
    return offsets


def _pack_eight_bits(blocks: Unpacked) -> PackedBlocks:
    count = blocks.levels.shape[1]
    levels = blocks.levels.reshape(-1, OUTPUTS, count, BLOCK).transpose(0, 2, 1, 3)
    scales = blocks.scales.reshape(-1, OUTPUTS, count).transpose(0, 2, 1)
    return PackedBlocks(np.ascontiguousarray(levels), np.ascontiguousarray(scales))


def _as_they_are(x: Array) -> Array:
    return x


EXACT = BlockForm(
    "exact",
    OUTPUTS,
    TILES,
    WITH_EXACT_ACTIVATIONS.__contains__,
    pack,
    _exact_shapes,
    scratch_floats,
    _as_they_are,
)
"""Rows of bfloat16, and weights rounded to bfloat16."""
