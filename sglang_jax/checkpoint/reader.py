"""The interface of checkpoint readers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from sglang_jax.checkpoint.encoding import Encoding

Array = NDArray[Any]
"""float32, float16 or `ml_dtypes.bfloat16`; quantised values are int8, uint8 or `ml_dtypes.float8_e4m3fn`."""

Index = tuple[slice, ...]
"""Slices of step 1 for the leading axes; the other axes are whole."""


class Role(Enum):
    """The role of an array of a quantised matrix: see `Encoding`."""

    VALUES = "values"
    SCALES = "scales"
    INPUT_SCALE = "input_scale"


class TensorReader(Protocol):
    """Tensors under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), matrices as [out, in].

    Opening reads no tensor. Reading a part reads only its bytes if the format allows it, so that each node of a sharded
    model reads only its shard.
    """

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `CheckpointError` for a name that is not in `names()`, as `read` does."""
        ...

    def read(self, name: str, index: Index | None = None) -> Array:
        """The tensor, or its part at `index`, in plain numbers. It may be a read-only view of the file: copy it before
        writing."""
        ...

    def encoding(self, name: str) -> Encoding | None:
        """The encoding of a matrix; None if it can only be read as plain numbers. Reads no values."""
        ...

    def in_bfloat16(self, name: str) -> bool:
        """Whether a tensor is stored in bfloat16, so that `read` returns it. Reads no values."""
        ...

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """An array of a matrix with an encoding, or of its part at `index`, which must be whole blocks."""
        ...


class PlainReader:
    """Base of `TensorReader`s without quantised tensors, of float32 unless they say otherwise."""

    def encoding(self, name: str) -> Encoding | None:
        return None

    def in_bfloat16(self, name: str) -> bool:
        return False

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        raise ValueError(f"{name} is stored as plain numbers, without {role.value}")


class TensorsInMemory(PlainReader):
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
