"""Quantised matrices, as checkpoints store them: values of few bits, with scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.group_blocks import GroupType
from sglang_jax.checkpoint.reader import Array, Role


class ValueType(Enum):
    """The type of stored values, before multiplication by scales."""

    INT8 = "int8"
    FLOAT8_E4M3 = "float8_e4m3fn"


AnyBlocks = BlockType | GroupType
AnyValues = ValueType | AnyBlocks


class ActivationScales(Enum):
    """How the input of a matrix is quantised to the type of its values before the product."""

    NONE = "none"
    TOKEN = "token"
    """One scale per token: its largest absolute value over the largest value of the type."""
    TENSOR = "tensor"
    """One scale, which is stored (`Role.INPUT_SCALE`)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a matrix `[out, in]`, or a stack `[experts, out, in]`, is stored.

    - `values`: 8-bit values, which are multiplied by a scale of their row: values have the shape of the matrix, scales
      are float32 `[out]` or `[experts, out]`. Or blocks, which include their scales: uint8 `[out, in / block, bytes]`.
    - `activations`: how the input is quantised. A stored input scale is float32 and repeated for each row, so that
      joined matrices keep theirs.
    """

    values: AnyValues
    activations: ActivationScales = ActivationScales.NONE

    @property
    def block(self) -> int | None:
        """Weights of a row in a block; None without blocks."""
        return None if isinstance(self.values, ValueType) else self.values.weights

    @property
    def value_type(self) -> ValueType:
        """The type of values with a scale per row. Raises `TypeError` for blocks."""
        if not isinstance(self.values, ValueType):
            raise TypeError(f"{self.values.value} matrices are blocks")
        return self.values

    @property
    def block_type(self) -> AnyBlocks:
        """The type of blocks. Raises `TypeError` for values with a scale per row."""
        if isinstance(self.values, ValueType):
            raise TypeError(f"{self.values.value} matrices are without blocks")
        return self.values

    @property
    def roles(self) -> tuple[Role, ...]:
        if not isinstance(self.values, ValueType):
            return (Role.VALUES,)
        input_scale = (Role.INPUT_SCALE,) if self.activations is ActivationScales.TENSOR else ()
        return (Role.VALUES, Role.SCALES, *input_scale)

    def for_inputs(self, inputs: int) -> Encoding:
        """The encoding of a part of `inputs` columns: in smaller groups if that cuts the matrix' own, and if some
        divide it."""
        smaller = self.values.for_inputs(inputs) if isinstance(self.values, GroupType) else None
        return self if smaller is None else replace(self, values=smaller)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales, without input scales; `columns` must be whole blocks."""
        if not isinstance(self.values, ValueType):
            return rows * (columns // self.values.weights) * self.values.nbytes
        return rows * columns + rows * np.dtype(np.float32).itemsize

    def places(self, columns: slice, width: int) -> slice:
        """Where an array of values has some of the `width` columns, which are whole blocks."""
        first, last, _ = columns.indices(width)
        size = self.block or 1
        return slice(first // size, last // size)

    def allows(self, columns: slice, width: int) -> bool:
        """Whether a slice of the `width` columns of a matrix consists of whole blocks."""
        if self.block is None:
            return True
        first, last, _ = columns.indices(width)
        return not (first % self.block or last % self.block)


BLOCKS = {kind: Encoding(kind) for kind in BlockType}
"""Encodings of GGUF files."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised matrix, or a stack of them: arrays by role. The first axis of each array is the rows; of a stack, the
    matrices, and then the rows."""

    encoding: Encoding
    arrays: Mapping[Role, Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """`(out, in)`, or `(experts, out, in)`."""
        values = self.arrays[Role.VALUES].shape
        return values if self.encoding.block is None else (*values[:-2], values[-2] * self.encoding.block)

    def widened(self) -> NDArray[np.float32]:
        """Dequantises to float32, `[out, in]` or `[experts, out, in]`."""
        values = self.arrays[Role.VALUES]
        if self.encoding.block is not None:
            rows = math.prod(values.shape[:-2])
            blocks = self.encoding.block_type.unpack(values.reshape(rows, *values.shape[-2:]))
            return blocks.widened().reshape(self.shape)
        widened: NDArray[np.float32] = values.astype(np.float32)
        widened *= self.arrays[Role.SCALES].astype(np.float32)[..., None]
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
