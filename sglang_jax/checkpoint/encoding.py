"""Quantised matrices, as checkpoints store them: values of few bits, with scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.ggml_blocks import BlockType, unpacked
from sglang_jax.checkpoint.reader import Array, Role


class ValueType(Enum):
    """The type of stored values, before multiplication by scales."""

    INT8 = "int8"
    FLOAT8_E4M3 = "float8_e4m3fn"


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
      are `[out]` or `[experts, out]`. Or blocks, which include their scales: uint8 `[out, in / block, bytes]`.
    - `block`: weights of a row in a block; None without blocks.
    - `scales`: dtype of the scales.
    - `activations`: how the input is quantised. A stored input scale is float32 and repeated for each row, so that
      joined matrices keep theirs.
    """

    values: ValueType | BlockType
    block: int | None
    scales: str
    activations: ActivationScales = ActivationScales.NONE

    @property
    def value_type(self) -> ValueType:
        """The type of values with a scale per row. Raises `TypeError` for blocks."""
        if isinstance(self.values, BlockType):
            raise TypeError(f"{self.values.value} matrices are blocks")
        return self.values

    @property
    def block_type(self) -> BlockType:
        """The type of blocks. Raises `TypeError` for values with a scale per row."""
        if isinstance(self.values, ValueType):
            raise TypeError(f"{self.values.value} matrices are without blocks")
        return self.values

    @property
    def roles(self) -> tuple[Role, ...]:
        if isinstance(self.values, BlockType):
            return (Role.VALUES,)
        input_scale = (Role.INPUT_SCALE,) if self.activations is ActivationScales.TENSOR else ()
        return (Role.VALUES, Role.SCALES, *input_scale)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with its scales, without input scales; `columns` must be whole blocks."""
        if isinstance(self.values, BlockType):
            return rows * (columns // self.values.weights) * self.values.nbytes
        return rows * columns + rows * np.dtype(self.scales).itemsize

    def allows(self, columns: slice, width: int) -> bool:
        """Whether a slice of the `width` columns of a matrix consists of whole blocks."""
        if self.block is None:
            return True
        first, last, _ = columns.indices(width)
        return not (first % self.block or last % self.block)


BLOCKS = {kind: Encoding(kind, kind.weights, "float16") for kind in BlockType}
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
            blocks = unpacked(self.encoding.block_type, values.reshape(-1, *values.shape[-2:]))
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
