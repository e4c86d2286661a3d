"""Matrices that are quantised while they are read: `--quantization`."""

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
"""How each matrix of a model is kept; None for plain numbers."""

INT8_ROWS = Encoding(ValueType.INT8, None, "float32")
FLOAT8_ROWS = Encoding(ValueType.FLOAT8_E4M3, None, "float32", activations=ActivationScales.TOKEN)
"""8 bits with a scale of each row. Products of float8 may round their inputs to it too, as they must on a GPU."""

_LARGEST = {ValueType.INT8: 127.0, ValueType.FLOAT8_E4M3: 448.0}
_WEIGHTS_AT_A_TIME = 2**20
_STAY_PLAIN = frozenset({Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.SHARED_ROUTER, Part.KEY_UP, Part.VALUE_UP})
"""Embeddings are looked up, few bits of a head or a router change which token or expert is the best, and latent
attention multiplies queries by what makes keys."""


def all_plain(name: ParameterName) -> Encoding | None:
    """The encodings of a model whose matrices are all plain numbers."""
    return None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantises rows of matrices symmetrically, each by its largest weight, so that a part of a matrix has the numbers
    that it has in the whole. `encoding`: one with a scale of each row."""

    encoding: Encoding

    def takes(self, spec: ParameterSpec) -> bool:
        """Whether it quantises a parameter: the matrices of layers, those of experts too."""
        return spec.is_matrix and spec.name.part not in _STAY_PLAIN

    def arrays(self, rows: Array, roles: Collection[Role]) -> dict[Role, Array]:
        """Values, scales or both of whole rows `[..., out, in]` of numbers. Some rows at a time: beside the numbers and
        what is returned there are some MiB.

        **Raises:** `ValueError` for numbers that are not finite.
        """
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
        scales: NDArray[np.float32] = np.asarray(largest / np.float32(_LARGEST[self.encoding.values]))
        # A row of zeros, and one so small that its scale would be none, is divided by 1.
        scales[scales < np.finfo(np.float32).tiny] = 1.0
        return scales
