"""Quantises matrices when they are read (`--quantization`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import ParameterName, ParameterSpec
from sglang_jax.architectures.tensor_names import HEADS, TABLES, Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales, group_size
from sglang_jax.checkpoint.reader import Array, Role

Encodings = Callable[[ParameterName], Encoding | None]
"""The encoding of each matrix of a model; None for plain numbers."""

INT8_ROWS = Encoding(ValueType.INT8)
FLOAT8_ROWS = Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TOKEN)
"""8 bits with a scale per row. Products of float8 may round their inputs to float8 too; on a GPU they must."""

INT4_GROUPS = Encoding(GroupType(Levels.INT4, 128, Scales.BFLOAT16))

_LARGEST = {ValueType.INT8: 127.0, ValueType.FLOAT8_E4M3: 448.0}
_DTYPES = {ValueType.INT8: np.dtype(np.int8), ValueType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn)}
_MOST = {
    Levels.INT4: (7.0, 7.5, 8.0, 8.5, 9.5),
    Levels.INT8: (127.0,),
    Levels.FLOAT8_E4M3: (448.0,),
    Levels.FLOAT4_E2M1: (6.0,),
}
"""What the largest number of a group may become, before it is rounded and cut."""

_RANGES = {
    Levels.INT4: (-8, 7),
    Levels.INT8: (-127, 127),
    Levels.FLOAT8_E4M3: (-448, 448),
    Levels.FLOAT4_E2M1: (-6, 6),
}
_WEIGHTS_AT_A_TIME = 2**20
_STAY_PLAIN = frozenset({*TABLES, *HEADS, Part.ROUTER, Part.SHARED_ROUTER, Part.KEY_UP, Part.VALUE_UP})
"""Embeddings are looked up; rounding a head or router changes the best token or expert; and latent attention multiplies
queries by the matrices that make keys."""


def all_plain(name: ParameterName) -> Encoding | None:
    """`Encodings` of a model without quantised matrices."""
    return None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantises each row, or each group of a row, symmetrically, so that a slice of rows has the same values as in the
    whole matrix. `encoding`: one with a scale per row, or with groups, whose zeros, if any, are the usual one."""

    encoding: Encoding

    def of(self, spec: ParameterSpec) -> Quantization | None:
        """The same, with smaller groups if its own do not divide the inputs of a matrix; None if that stays plain."""
        if not spec.is_matrix or spec.name.part in _STAY_PLAIN:
            return None
        values = self.encoding.values
        if not isinstance(values, GroupType):
            return self
        size = group_size(spec.shape[-1], values.weights)
        return None if size is None else Quantization(Encoding(replace(values, weights=size)))

    def widened(self, rows: Array) -> NDArray[np.float32]:
        """Whole rows `[..., out, in]` after quantisation, dequantised. Raises as `arrays`."""
        return Stored(self.encoding, self.arrays(rows, self.encoding.roles)).widened()

    def arrays(self, rows: Array, roles: Collection[Role]) -> dict[Role, Array]:
        """Quantises whole rows `[..., out, in]`; returns values, scales or both. Works on some rows at a time, so it
        needs only some MiB in addition. Raises `ValueError` for numbers that are not finite."""
        flat = rows.reshape(-1, rows.shape[-1])
        shapes = self._of_row(flat.shape[1])
        own: dict[Role, Array] = {role: np.empty((len(flat), *shapes[role][0]), shapes[role][1]) for role in roles}
        together = max(_WEIGHTS_AT_A_TIME // flat.shape[1], 1)
        for first in range(0, len(flat), together):
            some = slice(first, first + together)
            for role, found in self._quantised(flat[some].astype(np.float32), roles).items():
                own[role][some] = found
        return {role: each.reshape(*rows.shape[:-1], *each.shape[1:]) for role, each in own.items()}

    def _of_row(self, columns: int) -> dict[Role, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shape and the dtype of each array for a row."""
        values = self.encoding.values
        if isinstance(values, ValueType):
            return {Role.VALUES: ((columns,), _DTYPES[values]), Role.SCALES: ((), np.dtype(np.float32))}
        return {Role.VALUES: ((columns // values.weights, values.nbytes), np.dtype(np.uint8))}

    def _quantised(self, numbers: NDArray[np.float32], roles: Collection[Role]) -> dict[Role, Array]:
        values = self.encoding.values
        if isinstance(values, GroupType):
            return {Role.VALUES: _in_groups(numbers, values)}
        kind = self.encoding.value_type
        scales = _scales(numbers, _LARGEST[kind])
        found: dict[Role, Array] = {Role.SCALES: scales}
        if Role.VALUES in roles:
            numbers /= scales[:, None]
            found[Role.VALUES] = np.rint(numbers) if kind is ValueType.INT8 else numbers
        return {role: found[role] for role in roles}


def _scales(numbers: NDArray[np.float32], most: float) -> NDArray[np.float32]:
    """Scales by which the largest number of each row becomes `most`."""
    largest = np.maximum(numbers.max(axis=-1, initial=0.0), -numbers.min(axis=-1, initial=0.0))
    if not np.isfinite(largest).all():
        raise ValueError("numbers that are not finite cannot be quantised")
    scales: NDArray[np.float32] = np.asarray(largest / np.float32(most))
    # Rows of zeros, or so small that the scale would be subnormal, get the scale 1.
    scales[scales < np.finfo(np.float32).tiny] = 1.0
    return scales


def _in_groups(numbers: NDArray[np.float32], kind: GroupType) -> Array:
    """Blocks of rows. The scale of a group is that of several with the least square error: with a smaller one, the
    largest numbers are cut, and the others are nearer."""
    groups = numbers.reshape(-1, kind.weights)
    best, *others = (_Rounded.of(groups, kind, most) for most in _MOST[kind.levels])
    for each in others:
        best = best.or_better(each)
    rows = len(numbers)
    levels = kind.levels.of(best.levels + np.float32(kind.levels.zero))
    scales = best.scales.reshape(rows, -1)
    zeros = np.full(scales.shape, kind.levels.zero, kind.levels.dtype) if kind.zeros else None
    return kind.join(levels.reshape(rows, -1), scales, zeros)


@dataclass(frozen=True, slots=True)
class _Rounded:
    """Groups `[count, weights]` as levels less their zero, with scales and square errors `[count]`: float32."""

    levels: NDArray[np.float32]
    scales: NDArray[np.float32]
    errors: NDArray[np.float32]

    @classmethod
    def of(cls, groups: NDArray[np.float32], kind: GroupType, most: float) -> _Rounded:
        scales = _scales(groups, most).astype(kind.scales.dtype).astype(np.float32)
        levels = groups / scales[:, None]
        least, largest = _RANGES[kind.levels]
        if not kind.levels.is_float:
            np.rint(levels, out=levels)
        np.clip(levels, least, largest, out=levels)
        return cls(levels, scales, np.square(levels * scales[:, None] - groups).sum(-1))

    def or_better(self, other: _Rounded) -> _Rounded:
        better = other.errors < self.errors
        return _Rounded(
            np.where(better[:, None], other.levels, self.levels),
            np.where(better, other.scales, self.scales),
            np.where(better, other.errors, self.errors),
        )
