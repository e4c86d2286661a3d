"""Blocks of weights quantised in groups: the weights of a row that share a scale, with that scale behind them.

Checkpoints of GPTQ, AWQ, compressed-tensors and others keep values, scales and zeros in separate tensors; readers
join them to such blocks, so that one array has a whole matrix, as in GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.ggml_blocks import BLOCK, FLOAT4, FLOAT4_ZERO, BlockType, Unpacked
from sglang_jax.checkpoint.reader import Array

SIZES = (32, 64, 128)
"""Numbers of weights in a group, smallest first. Larger groups are stored as several with the same scale."""

OF_NVFP4 = 16
"""Weights in a group of NVFP4, of which kernels need an even number: see `group_size`."""


class Levels(Enum):
    """The type of values, before multiplication by scales: its bits, the dtype in which numpy has it, and what is
    subtracted where blocks have no zeros. Levels of 4 bits are uint8; those of floats are their bits, of the Open
    Compute Project's E2M1."""

    INT4 = "int4"
    INT8 = "int8"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT4_E2M1 = "float4_e2m1fn"

    @property
    def bits(self) -> int:
        return 4 if self in (Levels.INT4, Levels.FLOAT4_E2M1) else 8

    @property
    def dtype(self) -> np.dtype[Any]:
        if self.bits == 4:
            return np.dtype(np.uint8)
        return np.dtype(np.int8 if self is Levels.INT8 else ml_dtypes.float8_e4m3fn)

    @property
    def zero(self) -> int:
        return 8 if self is Levels.INT4 else 0

    @property
    def is_float(self) -> bool:
        return self in (Levels.FLOAT8_E4M3, Levels.FLOAT4_E2M1)

    def numbers(self, levels: Array) -> NDArray[np.float32]:
        """What levels stand for, before zeros are subtracted: float32."""
        if self is Levels.FLOAT4_E2M1:
            levels = levels.view(ml_dtypes.float4_e2m1fn)
        found: NDArray[np.float32] = levels.astype(np.float32)
        return found

    def of(self, numbers: NDArray[np.float32]) -> Array:
        """The levels of numbers that these levels can stand for; floats are rounded to them."""
        if self is Levels.FLOAT4_E2M1:
            codes: Array = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            return codes
        return numbers.astype(self.dtype)


class Scales(Enum):
    """Dtypes of scales. `POWER_OF_TWO` has a byte for the exponent: E8M0."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    POWER_OF_TWO = "float8_e8m0fnu"

    @property
    def dtype(self) -> np.dtype[Any]:
        return _SCALE_DTYPES[self]


_SCALE_DTYPES: dict[Scales, np.dtype[Any]] = {
    Scales.FLOAT16: np.dtype(np.float16),
    Scales.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    Scales.FLOAT32: np.dtype(np.float32),
    Scales.POWER_OF_TWO: np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True, slots=True)
class GroupType:
    """Blocks of `weights` values. A weight is `scale * (level - zero)`.

    Bytes of a block: its levels, then its scale, then its zero if it has `zeros`, in the dtype of levels; with
    `scale_first`, as in GGUF files, its scale and then its levels. Levels of 4 bits are unsigned, the first half of the
    group in the low halves of bytes. Raises `ValueError` for floats with
    zeros, which no format has.
    """

    levels: Levels
    weights: int
    scales: Scales
    zeros: bool = False
    scale_first: bool = False

    def __post_init__(self) -> None:
        if self.zeros and self.levels.is_float:
            raise ValueError("groups of floats have no zeros")

    @property
    def value(self) -> str:
        """A name for logs, such as `int4 in groups of 128`."""
        return f"{self.levels.value} in groups of {self.weights}{' with zeros' if self.zeros else ''}"

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self._level_bytes + self.scales.dtype.itemsize + self.zeros

    @property
    def _level_bytes(self) -> int:
        return self.weights * self.levels.bits // 8

    @property
    def level_places(self) -> slice:
        """The bytes of a block that have its levels."""
        first = self.scales.dtype.itemsize if self.scale_first else 0
        return slice(first, first + self._level_bytes)

    @property
    def scale_places(self) -> slice:
        """The bytes of a block that have its scale. A zero is in the last byte of all."""
        first = 0 if self.scale_first else self._level_bytes
        return slice(first, first + self.scales.dtype.itemsize)

    def join(self, levels: Array, scales: Array, zeros: Array | None = None) -> Array:
        """Blocks, uint8 `[rows, groups, nbytes]`, of levels `[rows, groups * weights]`, and scales and zeros `[rows,
        groups]`. Zeros have the dtype of levels."""
        rows, groups = scales.shape
        own, half = levels.reshape(rows, groups, self.weights), self._level_bytes
        blocks = np.empty((rows, groups, self.nbytes), np.uint8)
        if self.levels.bits == 4:
            np.bitwise_or(own[..., :half], own[..., half:] << 4, out=blocks[..., self.level_places])
        else:
            blocks[..., self.level_places] = own.view(np.uint8)
        blocks[..., self.scale_places] = np.ascontiguousarray(scales[..., None], self.scales.dtype).view(np.uint8)
        if zeros is not None:
            blocks[..., -1] = zeros.view(np.uint8)
        return blocks

    def split(self, blocks: Array) -> tuple[Array, Array, Array | None]:
        """Levels `[rows, groups, weights]`, scales and zeros `[rows, groups]` of blocks; the reverse of `join`."""
        levels = blocks[..., self.level_places]
        if self.levels.bits == 4:
            levels = np.concatenate((levels & 15, levels >> 4), axis=-1)
        scales = np.ascontiguousarray(blocks[..., self.scale_places]).view(self.scales.dtype)[..., 0]
        zeros = np.ascontiguousarray(blocks[..., -1]).view(self.levels.dtype) if self.zeros else None
        return np.ascontiguousarray(levels).view(self.levels.dtype), scales, zeros

    def for_inputs(self, inputs: int) -> GroupType | None:
        """The same groups, or smaller ones that divide a part of `inputs` weights of a row; None if none do."""
        size = group_size(inputs, self.weights)
        return None if size is None else replace(self, weights=size)

    def divided(self, blocks: Array, weights: int) -> Array:
        """Blocks `[..., groups, nbytes]` as smaller ones, of `weights` values, which repeat the scales and zeros:
        `[..., groups * self.weights / weights, ...]`."""
        levels, scales, zeros = self.split(blocks.reshape(-1, *blocks.shape[-2:]))
        times, smaller = self.weights // weights, replace(self, weights=weights)
        repeated = None if zeros is None else zeros.repeat(times, 1)
        found = smaller.join(levels.reshape(len(levels), -1), scales.repeat(times, 1), repeated)
        return found.reshape(*blocks.shape[:-2], *found.shape[1:])

    def unpack(self, blocks: Array) -> Unpacked:
        """See `Unpacked`; scales and offsets are float32."""
        levels, scales, zeros = self.split(blocks)
        wide = scales.astype(np.float32)
        if self.levels is Levels.FLOAT4_E2M1:
            in_blocks = levels.reshape(len(blocks), -1, BLOCK)
            return Unpacked(in_blocks, FLOAT4_ZERO, wide / 2, table=FLOAT4)
        offsets = None if zeros is None else -wide * zeros.astype(np.float32)
        in_blocks = levels.reshape(len(blocks), blocks.shape[1] * self.weights // BLOCK, BLOCK)
        return Unpacked(in_blocks, 0 if self.zeros else self.levels.zero, wide, offsets)


AS_GROUPS = {
    BlockType.Q4_0: GroupType(Levels.INT4, BLOCK, Scales.FLOAT16, scale_first=True),
    BlockType.Q8_0: GroupType(Levels.INT8, BLOCK, Scales.FLOAT16, scale_first=True),
    BlockType.MXFP4: GroupType(Levels.FLOAT4_E2M1, BLOCK, Scales.POWER_OF_TWO, scale_first=True),
}
"""GGUF's types that are groups; others have offsets besides scales, or scales in two steps."""


def groups_of(values: object) -> GroupType | None:
    """The groups of which matrices of a type consist; None for types that are not groups."""
    if isinstance(values, BlockType):
        return AS_GROUPS.get(values)
    return values if isinstance(values, GroupType) else None


def group_size(inputs: int, stored: int) -> int | None:
    """The weights of a group in which a matrix is kept whose checkpoint has groups of `stored`: the largest of `SIZES`
    that divides both; None if none does. Groups of NVFP4 stay as they are."""
    if stored == OF_NVFP4:
        return None if inputs % BLOCK else stored
    found = [size for size in SIZES if not stored % size and not inputs % size]
    return found[-1] if found else None
