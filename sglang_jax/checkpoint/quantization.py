"""Matrices that are quantised while they are read: `--quantization`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import ParameterName, ParameterSpec
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding, ValueType
from sglang_jax.checkpoint.reader import Array, Role

Encodings = Callable[[ParameterName], Encoding | None]
"""How each matrix of a model is kept; None for plain numbers."""

INT8_ROWS = Encoding(ValueType.INT8, None, "float32")
FLOAT8_ROWS = Encoding(ValueType.FLOAT8_E4M3, None, "float32")
"""8 bits with a scale of each row."""

_LARGEST = {ValueType.INT8: 127.0, ValueType.FLOAT8_E4M3: 448.0}
_STAY_PLAIN = frozenset({Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.SHARED_ROUTER})
"""Embeddings are looked up, few bits of a head or a router change which token or expert is the best."""


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

    def array(self, rows: Array, role: Role) -> Array:
        """Values or scales of whole rows `[..., out, in]` of numbers."""
        numbers = rows.astype(np.float32)
        scales = self._scales(numbers)
        if role is Role.SCALES:
            return scales
        divided = numbers / scales[..., None]
        if self.encoding.values is ValueType.INT8:
            integers: Array = np.rint(divided).astype(np.int8)
            return integers
        values: Array = divided.astype(ml_dtypes.float8_e4m3fn)
        return values

    def _scales(self, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        largest: NDArray[np.float32] = np.abs(numbers).max(axis=-1, initial=0.0)
        # A row of zeros, and one so small that its scale would be none, is divided by 1.
        scales: NDArray[np.float32] = np.asarray(largest / np.float32(_LARGEST[self.encoding.values]))
        scales[scales < np.finfo(np.float32).tiny] = 1.0
        return scales
