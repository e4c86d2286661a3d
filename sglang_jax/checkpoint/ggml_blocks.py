"""Quantised blocks of GGUF files as separate arrays of values and scales. Layouts: `ggml-common.h` of ggml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from sglang_jax.checkpoint.reader import Array

BLOCK = 32
"""Weights of a row that are together in `Unpacked`: those of a small block, or an eighth of a large one."""

FLOAT4_ZERO = 12
FLOAT4 = tuple(FLOAT4_ZERO + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12))
"""Twice the number of each of the 16 floats of 4 bits, E2M1 of the Open Compute Project's formats, plus this zero."""


class BlockType(Enum):
    """Types of blocks, by their names in ggml."""

    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    MXFP4 = "MXFP4"

    @property
    def ggml(self) -> GGMLQuantizationType:
        return GGMLQuantizationType[self.value]

    @property
    def weights(self) -> int:
        """Weights of a row in a block: 32 or 256."""
        weights: int = GGML_QUANT_SIZES[self.ggml][0]
        return weights

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        size: int = GGML_QUANT_SIZES[self.ggml][1]
        return size

    def unpack(self, blocks: Array) -> Unpacked:
        """Unpacks `[rows, columns / weights, bytes]`, uint8."""
        return _UNPACK[self](blocks)

    @property
    def halves(self) -> tuple[int, ...]:
        """The bytes of a block where a float16 begins."""
        if self is BlockType.MXFP4:
            return ()
        if self is BlockType.Q6_K:
            return (208,)
        return (0,) if self in (BlockType.Q4_0, BlockType.Q5_0, BlockType.Q8_0) else (0, 2)


WITH_EXACT_ACTIVATIONS = (BlockType.Q4_0, BlockType.Q4_1, BlockType.Q8_0)
"""Types that kernels multiply with activations in bfloat16; they multiply all types with activations in int8."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Weights `scale * (level - zero) + offset` of a matrix `[rows, columns]`.

    - `levels`: `[rows, columns / 32, 32]`, uint8; int8 for 8 bits. With a `table` of 16 numbers, each stands for one of
      these.
    - `scales`: `[rows, columns / 32]`, or `/ 16` in Q6_K; `offsets`: of the same shape; None for none. Both are
      float16; or int8, and multiplied by `factors`. Values with a scale per row have float32 `[rows, 1]`, and groups
      of 16 to 128 and blocks of MXFP4 float32 `[rows, groups]`.
    - `factors`: float16 `[rows, columns / 256, 2]`, of scales and of offsets, without offsets `[..., 1]`; or None.
    """

    levels: Array
    zero: int
    scales: Array
    offsets: Array | None = None
    factors: Array | None = None
    table: tuple[int, ...] = ()

    def widened(self) -> NDArray[np.float32]:
        """The weights, rounded as the gguf package does: products to float32, then sums."""
        rows, blocks, together = self.levels.shape
        levels = np.array(self.table, np.uint8)[self.levels] if self.table else self.levels
        values = levels.astype(np.float32) - np.float32(self.zero)
        groups = self.scales.shape[1]
        values = values.reshape(rows, groups, blocks * together // max(groups, 1))
        values *= self._numbers(self.scales, 0)[..., None]
        if self.offsets is not None:
            values += self._numbers(self.offsets, 1)[..., None]
        found: NDArray[np.float32] = values.reshape(rows, blocks * together)
        return found

    def _numbers(self, stored: Array, which: int) -> NDArray[np.float32]:
        numbers: NDArray[np.float32] = stored.astype(np.float32)
        if self.factors is None:
            return numbers
        factors = self.factors[..., which].astype(np.float32)
        by_block = numbers.reshape(*factors.shape, -1) * factors[..., None]
        return by_block.reshape(numbers.shape)


def _halves(blocks: Array, first: int, count: int = 1) -> NDArray[np.float16]:
    """`count` numbers from byte `first` of each block on: `[rows, blocks, count]`."""
    found: NDArray[np.float16] = np.ascontiguousarray(blocks[..., first : first + 2 * count]).view(np.float16)
    return found


def _nibbles(data: Array) -> Array:
    """The low halves of the last axis, then its high halves."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _fifth_bits(data: Array) -> Array:
    """Bit i of each block's four bytes, as 16 or 0: `[..., 32]`."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Unpacked:
    return Unpacked(_nibbles(blocks[..., 2:]), 8, _halves(blocks, 0)[..., 0])


def _q4_1(blocks: Array) -> Unpacked:
    scales = _halves(blocks, 0, 2)
    return Unpacked(_nibbles(blocks[..., 4:]), 0, scales[..., 0], scales[..., 1])


def _q5_0(blocks: Array) -> Unpacked:
    levels = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Unpacked(levels, 16, _halves(blocks, 0)[..., 0])


def _q5_1(blocks: Array) -> Unpacked:
    scales = _halves(blocks, 0, 2)
    levels = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Unpacked(levels, 0, scales[..., 0], scales[..., 1])


def _q8_0(blocks: Array) -> Unpacked:
    return Unpacked(blocks[..., 2:].view(np.int8), 0, _halves(blocks, 0)[..., 0])


def _q4_k(blocks: Array) -> Unpacked:
    return _with_minimums(blocks, _halves_by_64(blocks[..., 16:]))


def _q5_k(blocks: Array) -> Unpacked:
    # Byte i has a bit for weight i of each of the eight groups of 32.
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _with_minimums(blocks, _halves_by_64(blocks[..., 48:]) | (bits << 4))


def _q6_k(blocks: Array) -> Unpacked:
    """Each half of a block has 128 weights in four quarters. Bytes 0 to 31 of its low bits are those of the first
    quarter and the third, bytes 32 to 63 those of the second and the fourth. The upper bits of all four share a byte.
    """
    shape = blocks.shape[:-1]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    levels = low.reshape(*shape, 8, BLOCK) | (high.reshape(*shape, 8, BLOCK) << 4)
    scales = blocks[..., 192:208].view(np.int8).reshape(len(blocks), -1)
    return Unpacked(levels.reshape(len(blocks), -1, BLOCK), 32, scales, factors=_halves(blocks, 208))


def _mxfp4(blocks: Array) -> Unpacked:
    scales = np.ascontiguousarray(blocks[..., 0]).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return Unpacked(_nibbles(blocks[..., 1:]), FLOAT4_ZERO, scales / 2, table=FLOAT4)


def _with_minimums(blocks: Array, levels: Array) -> Unpacked:
    """The six bits of each scale and minimum of the eight groups: those of the first four are the low bits of bytes 4
    to 11 of a block; those of the others are split between the upper bits of these and the next four bytes."""
    first, second, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales, minimums = (
        np.concatenate((own & 63, low | (own >> 6 << 4)), axis=-1).view(np.int8).reshape(len(blocks), -1)
        for own, low in ((first, both & 15), (second, both >> 4))
    )
    # Minimums are subtracted.
    factors = _halves(blocks, 0, 2) * np.array([1, -1], np.float16)
    return Unpacked(levels.reshape(len(blocks), -1, BLOCK), 0, scales, minimums, factors)


def _halves_by_64(data: Array) -> Array:
    """128 bytes as `[..., 8, 32]`: 32 bytes have the low halves of 64 weights, and then their high halves."""
    return _nibbles(data.reshape(*data.shape[:-1], 4, BLOCK)).reshape(*data.shape[:-1], 8, BLOCK)


_UNPACK: dict[BlockType, Callable[[Array], Unpacked]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.MXFP4: _mxfp4,
}
