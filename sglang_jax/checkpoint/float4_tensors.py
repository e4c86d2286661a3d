"""Matrices of floats of 4 bits (E2M1), as the tensors of Hugging Face folders have them, the first of two in the low
half of a byte. Groups of a row share a scale:

- MXFP4: 32 weights, and the exponent of a power of two plus 127. compressed-tensors: `weight_packed`, uint8 `[out, in /
  2]`; `weight_scale`, uint8 `[out, groups]`.
- NVFP4: 16 weights, and a float8 (e4m3), which a number of the matrix multiplies. compressed-tensors: `weight_packed`,
  `weight_scale`, and `weight_global_scale`, by which scales are divided. ModelOpt: `weight`, `weight_scale`, and
  `weight_scale_2`. Scales of inputs, which are not rounded here, are not used.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.group_blocks import GroupType, Scales
from sglang_jax.checkpoint.grouped_tensors import GroupedMatrix, GroupLayout
from sglang_jax.checkpoint.reader import Array
from sglang_jax.errors import CheckpointError

_ONE = ((), (1,))
"""Shapes of one number."""


class Float4Matrix(GroupedMatrix):
    """What MXFP4 and NVFP4 have in common."""

    values = ".weight_packed"

    @property
    def shape(self) -> tuple[int, int]:
        rows, halves = self._sides(self.values)
        return rows, 2 * halves

    def faults(self) -> Iterator[str]:
        rows, columns = self.shape
        yield from self._fault_of(self.values, ((rows, columns // 2),), "uint8")
        if columns % self._size:
            yield f"misshapen: {self.stem}{self.values} has {columns} columns, they must be groups of {self._size}"
        if self.values != ".weight":
            yield from self._extra(".weight")

    @property
    def _scale_name(self) -> str:
        return f"{self.stem}.weight_scale"

    def _levels(self, rows: slice, columns: slice) -> Array:
        first = columns.start // 2
        halves = self.folder.read_raw(f"{self.stem}{self.values}", (rows, slice(first, -(-columns.stop // 2))))
        levels = np.stack((halves & 15, halves >> 4), axis=-1).reshape(len(halves), -1)
        return np.ascontiguousarray(levels[:, columns.start - 2 * first : columns.stop - 2 * first])

    def _zeros(self, rows: slice, groups: slice) -> None:
        return None


class Mxfp4Matrix(Float4Matrix):
    endings: tuple[str, ...] = (".weight_packed", ".weight", ".weight_scale")

    @property
    def kind(self) -> GroupType | None:
        return self.scheme.blocks(self.shape[1], Scales.POWER_OF_TWO)

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from self._fault_of(".weight_scale", ((self.shape[0], self._num_groups),), "uint8")

    def _scales(self, rows: slice, groups: slice) -> Array:
        return self.folder.read_raw(self._scale_name, (rows, groups)).view(ml_dtypes.float8_e8m0fnu)


class Nvfp4Matrix(Float4Matrix):
    """Its blocks have scales in float32: the product of a group's float8 and the number of the matrix, or the quotient,
    rounded once."""

    endings: tuple[str, ...] = (
        ".weight_packed",
        ".weight",
        ".weight_scale",
        ".weight_global_scale",
        ".input_global_scale",
    )
    global_scale = ".weight_global_scale"

    @property
    def kind(self) -> GroupType | None:
        return self.scheme.blocks(self.shape[1], Scales.FLOAT32)

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from self._fault_of(".weight_scale", ((self.shape[0], self._num_groups),), "float8_e4m3fn")
        yield from self._fault_of(self.global_scale, _ONE, "float32")

    def _scales(self, rows: slice, groups: slice) -> NDArray[np.float32]:
        scales: NDArray[np.float32] = self.folder.read_raw(self._scale_name, (rows, groups)).astype(np.float32)
        return self._of_matrix(scales, self._global())

    def _global(self) -> np.float32:
        found = self.folder.read(f"{self.stem}{self.global_scale}").reshape(())
        if not (np.isfinite(found) and found > 0):
            raise CheckpointError(f"{self.stem}{self.global_scale} is {found:g}, it must be positive and finite")
        return np.float32(found)

    def _of_matrix(self, scales: NDArray[np.float32], own: np.float32) -> NDArray[np.float32]:
        return scales / own


class ModelOptNvfp4Matrix(Nvfp4Matrix):
    values, global_scale = ".weight", ".weight_scale_2"
    endings = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")

    def _of_matrix(self, scales: NDArray[np.float32], own: np.float32) -> NDArray[np.float32]:
        return scales * own


FLOAT4_CLASSES: dict[GroupLayout, type[Float4Matrix]] = {
    GroupLayout.MXFP4: Mxfp4Matrix,
    GroupLayout.NVFP4: Nvfp4Matrix,
    GroupLayout.NVFP4_MODELOPT: ModelOptNvfp4Matrix,
}
