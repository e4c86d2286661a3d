"""Quantised matrices, as checkpoints store them: values of few bits, with scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.reader import Array, Role

BLOCK = 32
"""Weights along the input axis that share a scale in a block of a GGUF file."""


class ValueType(Enum):
    """The type of stored values, before multiplication by scales."""

    INT4 = "int4"
    """0 to 15, two per byte."""
    INT8 = "int8"
    FLOAT8_E4M3 = "float8_e4m3fn"

    @property
    def bits(self) -> int:
        return 4 if self is ValueType.INT4 else 8


class ActivationScales(Enum):
    """How the input of a matrix is quantised to the type of its values before the product."""

    NONE = "none"
    TOKEN = "token"
    """One scale per token: its largest absolute value over the largest value of the type."""
    TENSOR = "tensor"
    """One scale, which is stored (`Role.INPUT_SCALE`)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a matrix `[out, in]`, or a stack `[experts, out, in]`, is stored: a weight is `scale * value`, or
    `scale * value + offset`.

    - `block`: number of weights along the input axis that share a scale (and an offset, if `offsets`). None if all
      weights of a row share it: values then have the shape of the matrix, scales are `[out]` or `[experts, out]`.
    - `scales`: dtype of the scales.
    - `activations`: how the input is quantised. A stored input scale is float32 and repeated for each row, so that
      joined matrices keep theirs.
    """

    values: ValueType
    block: int | None
    scales: str
    offsets: bool = False
    activations: ActivationScales = ActivationScales.NONE

    @property
    def bits(self) -> int:
        return self.values.bits

    @property
    def roles(self) -> tuple[Role, ...]:
        input_scale = (Role.INPUT_SCALE,) if self.activations is ActivationScales.TENSOR else ()
        return (Role.VALUES, Role.SCALES, *((Role.OFFSETS,) if self.offsets else ()), *input_scale)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales and offsets, without input scales; `columns` must be whole blocks."""
        scales = rows if self.block is None else rows * (columns // self.block)
        return rows * columns * self.bits // 8 + scales * np.dtype(self.scales).itemsize * (2 if self.offsets else 1)

    def allows(self, columns: slice, width: int) -> bool:
        """Whether a slice of the `width` columns of a matrix consists of whole blocks."""
        if self.block is None:
            return True
        first, last, _ = columns.indices(width)
        return not (first % self.block or last % self.block)


Q4 = Encoding(ValueType.INT4, BLOCK, "float16", offsets=True)
"""Q4_0 and Q4_1 of GGUF files. Values are `[out, in / 32, 16]`: byte i of a block has weight i in its low half and
weight i + 16 in its high half."""

Q8 = Encoding(ValueType.INT8, BLOCK, "float16")
"""Q8_0 of GGUF files. Values are `[out, in / 32, 32]`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised matrix, or a stack of them: arrays by role. The first axis of each array is the rows; of a stack, the
    matrices, and then the rows."""

    encoding: Encoding
    arrays: Mapping[Role, Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`, or `(experts, out, in)`."""
        if self.encoding.block is None:
            return self.arrays[Role.VALUES].shape
        *rows, blocks = self.arrays[Role.SCALES].shape
        return (*rows, blocks * self.encoding.block)

    def widened(self) -> NDArray[np.float32]:
        """Dequantises to float32, `[out, in]` or `[experts, out, in]`."""
        values = self.arrays[Role.VALUES]
        if self.encoding.values is ValueType.INT4:
            values = np.concatenate((values & 15, values >> 4), axis=-1)
        found = values.astype(np.float32)
        found *= self.arrays[Role.SCALES].astype(np.float32)[..., None]
        if self.encoding.offsets:
            found += self.arrays[Role.OFFSETS].astype(np.float32)[..., None]
        widened: NDArray[np.float32] = found.reshape(self.shape)
        return widened

    def of_rows(self, change: Callable[[Array], Array]) -> Stored:
        """Applies `change`, which reorders or selects rows, to every array."""
        return Stored(self.encoding, {role: change(array) for role, array in self.arrays.items()})

    @staticmethod
    def stacked(parts: Sequence[Stored]) -> Stored:
        """Concatenates matrices of one encoding along the output axis."""
        roles, outputs = parts[0].arrays, len(parts[0].shape) - 2
        return Stored(
            parts[0].encoding,
            {role: np.concatenate([part.arrays[role] for part in parts], axis=outputs) for role in roles},
        )
