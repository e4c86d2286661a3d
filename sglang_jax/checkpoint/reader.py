"""What every checkpoint reader offers: tensors by their Hugging Face names, whole or in part."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from sglang_jax.checkpoint.encoding import Encoding

Array = NDArray[Any]
"""float32, float16, or `ml_dtypes.bfloat16`; of values that have a scale int8, uint8 or `ml_dtypes.float8_e4m3fn`."""

Index = tuple[slice, ...]
"""One slice, of step 1, for each leading axis that is not taken whole."""


class Role(Enum):
    """What an array of a matrix that is not stored as plain numbers holds: see `Encoding`."""

    VALUES = "values"
    SCALES = "scales"
    OFFSETS = "offsets"
    INPUT_SCALE = "input_scale"


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
        """The tensor in plain numbers, or the part at `index`. It may be a read-only view of the file: copy before
        writing to it."""
        ...

    def encoding(self, name: str) -> Encoding | None:
        """How a matrix is stored; None for plain numbers, and for what is only read as such. Reads no values."""
        ...

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """One of the arrays of a matrix that has an encoding, or what belongs to the part of the matrix at `index`, of
        which it takes whole blocks."""
        ...


class PlainReader:
    """A `TensorReader` whose tensors are all plain numbers."""

    def encoding(self, name: str) -> Encoding | None:
        return None

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        raise ValueError(f"{name} is stored as plain numbers, without {role.value}")


class TensorsInMemory(PlainReader):
    """A `TensorReader` of given tensors."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, index: Index | None = None) -> Array:
        return self._tensors[name][index or ()]


def whole_index(shape: tuple[int, ...], index: Index | None) -> Index:
    """`index` with a slice for every axis of `shape`. Raises `IndexError` if it has more axes than the tensor."""
    given = index or ()
    if len(given) > len(shape):
        raise IndexError(f"an index of {len(given)} axes cannot select from a tensor of shape {shape}")
    return given + (slice(None),) * (len(shape) - len(given))
