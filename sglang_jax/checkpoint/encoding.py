"""Matrices of small numbers and scales, as checkpoints store them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.reader import Array, Role

BLOCK = 32
"""Weights along the inputs that share a scale in a block of a GGUF file."""


class ValueType(Enum):
    """What a weight is stored as, before it is multiplied by its scale."""

    INT4 = "int4"
    """0 to 15, two in a byte."""
    INT8 = "int8"

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return {ValueType.INT4: 4, ValueType.INT8: 8}[self]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a matrix `[out, in]` is stored: a weight is `scale * value`, or `scale * value + offset`.

    - `block`: weights along the inputs that share a scale, and an offset where `offsets` says that there are some.
    - `scales`: their type.
    """

    values: ValueType
    block: int
    scales: str
    offsets: bool = False

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return self.values.bits

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those of its arrays."""
        return (Role.VALUES, Role.SCALES, *((Role.OFFSETS,) if self.offsets else ()))

    def nbytes(self, weights: int) -> int:
        """Bytes of so many weights, with what they are multiplied by; whole blocks of them."""
        of_block = self.block * self.bits // 8 + np.dtype(self.scales).itemsize * (2 if self.offsets else 1)
        return weights // self.block * of_block

    def allows(self, columns: slice, width: int) -> bool:
        """Whether a part of the columns of a matrix with `width` of them takes whole blocks."""
        first, last, _ = columns.indices(width)
        return not (first % self.block or last % self.block)


Q4 = Encoding(ValueType.INT4, BLOCK, "float16", offsets=True)
"""Q4_0 and Q4_1 of GGUF files. Byte i of a block of values `[out, in / 32, 16]` has weight i in its low half and weight
i + 16 in its high one."""

Q8 = Encoding(ValueType.INT8, BLOCK, "float16")
"""Q8_0 of GGUF files. Values are `[out, in / 32, 32]`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix, or a part of one, as it is stored: its arrays by their role, each with the rows of the matrix first."""

    encoding: Encoding
    arrays: Mapping[Role, Array]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        scales = self.arrays[Role.SCALES]
        return len(scales), math.prod(scales.shape[1:]) * self.encoding.block

    def widened(self) -> NDArray[np.float32]:
        """The matrix in float32, `[out, in]`."""
        values = self.arrays[Role.VALUES]
        if self.encoding.values is ValueType.INT4:
            values = np.concatenate((values & 15, values >> 4), axis=-1)
        found = self.arrays[Role.SCALES].astype(np.float32)[..., None] * values
        if self.encoding.offsets:
            found += self.arrays[Role.OFFSETS].astype(np.float32)[..., None]
        widened: NDArray[np.float32] = found.reshape(self.shape)
        return widened

    def of_rows(self, change: Callable[[Array], Array]) -> Stored:
        """The same with its rows in another order, or fewer of them."""
        return Stored(self.encoding, {role: change(array) for role, array in self.arrays.items()})

    @staticmethod
    def stacked(parts: Sequence[Stored]) -> Stored:
        """Matrices of one encoding, one after the other along the outputs."""
        roles = parts[0].arrays
        return Stored(
            parts[0].encoding, {role: np.concatenate([part.arrays[role] for part in parts]) for role in roles}
        )
