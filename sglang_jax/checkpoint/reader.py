"""What every checkpoint reader offers: tensors by their Hugging Face names, whole or in part."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""float32, float16, or `ml_dtypes.bfloat16`."""

Index = tuple[slice, ...]
"""One slice, of step 1, for each leading axis that is not taken whole."""


class TensorReader(Protocol):
    """Tensors under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), matrices as [out, in].

    Opening reads no tensor. A part of a tensor costs no more than its own bytes where the format allows it, so that
    each node of a sharded model reads its own share.
    """

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `CheckpointError` for a name that is not in `names()`, as `read` does."""
        ...

    def read(self, name: str, index: Index | None = None) -> Array:
        """The tensor, or the part at `index`. It may be a read-only view of the file: copy before writing to it."""
        ...


def whole_index(shape: tuple[int, ...], index: Index | None) -> Index:
    """`index` with a slice for every axis of `shape`. Raises `IndexError` if it has more axes than the tensor."""
    given = index or ()
    if len(given) > len(shape):
        raise IndexError(f"an index of {len(given)} axes cannot select from a tensor of shape {shape}")
    return given + (slice(None),) * (len(shape) - len(given))


def row_numbers(length: int, rows: slice) -> NDArray[np.int64]:
    """The positions that `rows` selects on an axis of `length`: `[selected]`."""
    return np.arange(length, dtype=np.int64)[rows]
