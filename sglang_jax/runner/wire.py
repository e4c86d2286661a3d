"""Encodes messages between processes as msgpack, from the fields of dataclasses and their annotations: new fields need
no change here. An array is encoded as dtype, shape and bytes, and must match its annotation. Decoding creates only the
classes of the codec, whatever the bytes are; pickle would run code in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

Message = TypeVar("Message")


class FrameError(ValueError):
    """Bytes that are not a message of the codec: the other side runs another version, or is not part of the group."""


class Codec(Generic[Message]):
    """Encodes and decodes messages of the dataclasses `kinds`, with their names, which must be unique. Their fields are
    numbers, strings, enums, tuples, mappings, arrays with a dtype (`NDArray[np.int32]`), further dataclasses, or None.
    Decoded arrays are read-only."""

    def __init__(self, *kinds: type[Message]) -> None:
        self._names: dict[type, str] = {kind: kind.__name__ for kind in kinds}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
        self._envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_from_plain) for kind in kinds}
        self.form = _form(kinds)
        """A digest of the names of all fields: processes with different digests cannot communicate."""

    def encode(self, message: Message) -> bytes:
        """Raises `NotImplementedError` for a value of any other type than those above."""
        return self._encoder.encode((self._names[type(message)], message))

    def decode(self, data: bytes) -> Message:
        """Raises `FrameError` with the fault of the bytes."""
        try:
            name, body = self._envelope.decode(data)
            if name not in self._decoders:
                raise FrameError(f"a message named {name[:40]!r}, expected one of {', '.join(self._decoders)}")
            return self._decoders[name].decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(
                f"{len(data)} bytes that are not a message of {', '.join(self._decoders)}: {error}"
            ) from error


def _to_plain(value: object) -> object:
    match value:
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case np.generic():
            return value.item()
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent to another process")


def _from_plain(kind: Any, value: Any) -> NDArray[Any]:
    """Decodes the array of a field annotated with `kind`. Raises `ValueError`, `TypeError`, which `msgspec` reports
    with the field's path."""
    dtype = _dtype(kind)
    name, shape, data = value
    if name != dtype.str:
        raise ValueError(f"an array of {name!r:.20}, expected {dtype.str!r}")
    if type(data) is not bytes or type(shape) is not list:
        raise ValueError("an array is its dtype, its shape and its bytes")
    array: NDArray[Any] = np.ndarray(shape, dtype, data)
    if array.nbytes != len(data):
        raise ValueError(f"an array of shape {shape!r:.40} in {len(data)} bytes")
    return array


@lru_cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """The dtype of an annotation such as `NDArray[np.int32]`, little-endian. Raises `NotImplementedError`."""
    match get_args(kind):
        case (_, dtype) if get_args(dtype):
            found: np.dtype[Any] = np.dtype(get_args(dtype)[0]).newbyteorder("<")
            return found
    raise NotImplementedError(f"{kind} cannot be received from another process")


def _form(kinds: Sequence[type]) -> str:
    lines = sorted({line for kind in kinds for line in _lines(kind)})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines(kind: Any) -> Iterator[str]:
    """A line `Name: field, ...` for each dataclass in a type, and in the fields of these."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield f"{kind.__name__}: {', '.join(field.name for field in fields(kind))}"
        for inner in get_type_hints(kind).values():
            yield from _lines(inner)
    else:
        for inner in get_args(kind):
            yield from _lines(inner)
