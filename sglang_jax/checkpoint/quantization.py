"""Quantises matrices when they are read (`--quantization`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import ParameterName, ParameterSpec
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.reader import Array, Role

Encodings = Callable[[ParameterName], Encoding | None]
"""The encoding of each matrix of a model; None for plain numbers."""

INT8_ROWS = Encoding(ValueType.INT8, None, "float32")
FLOAT8_ROWS = Encoding(ValueType.FLOAT8_E4M3, None, "float32", activations=ActivationScales.TOKEN)
"""8 bits with a scale per row. Products of float8 may round their inputs to float8 too; on a GPU they must."""

_LARGEST = {ValueType.INT8: 127.0, ValueType.FLOAT8_E4M3: 448.0}
_WEIGHTS_AT_A_TIME = 2**20
_STAY_PLAIN = frozenset({Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.SHARED_ROUTER, Part.KEY_UP, Part.VALUE_UP})
"""Embeddings are looked up; rounding a head or router changes the best token or expert; and latent attention multiplies
queries by the matrices that make keys."""


def all_plain(name: ParameterName) -> Encoding | None:
    """`Encodings` of a model without quantised matrices."""
    return None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantises each row symmetrically by its largest absolute weight, so that a slice of rows has the same values as
    in the whole matrix. `encoding`: one with a scale per row."""

    encoding: Encoding

    def takes(self, spec: ParameterSpec) -> bool:
        return spec.is_matrix and spec.name.part not in _STAY_PLAIN

    def arrays(self, rows: Array, roles: Collection[Role]) -> dict[Role, Array]:
        """Quantises whole rows `[..., out, in]`; returns values, scales or both. Works on some rows at a time, so it
        needs only some MiB in addition. Raises `ValueError` for numbers that are not finite."""
        flat = rows.reshape(-1, rows.shape[-1])
        scales = np.empty(len(flat), np.float32)
        values: Array = np.empty(flat.shape if Role.VALUES in roles else 0, self._dtype)
        together = max(_WEIGHTS_AT_A_TIME // flat.shape[1], 1)
        for first in range(0, len(flat), together):
            some = slice(first, first + together)
            numbers = flat[some].astype(np.float32)
            scales[some] = self._scales(numbers)
            if Role.VALUES in roles:
                numbers /= scales[some, None]
                values[some] = np.rint(numbers) if self.encoding.values is ValueType.INT8 else numbers
        found = {Role.SCALES: scales.reshape(rows.shape[:-1])}
        if Role.VALUES in roles:
            found[Role.VALUES] = values.reshape(rows.shape)
        return {role: found[role] for role in roles}

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int8 if self.encoding.values is ValueType.INT8 else ml_dtypes.float8_e4m3fn)

    def _scales(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        largest = np.maximum(numbers.max(axis=-1, initial=0.0), -numbers.min(axis=-1, initial=0.0))
        if not np.isfinite(largest).all():
            raise ValueError("numbers that are not finite cannot be quantised")
        scales: NDArray[np.float32] = np.asarray(largest / np.float32(_LARGEST[self.encoding.value_type]))
        # Rows of zeros, or so small that the scale would be subnormal, get the scale 1.
        scales[scales < np.finfo(np.float32).tiny] = 1.0
        return scales
