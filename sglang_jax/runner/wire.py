"""Messages between processes as bytes: msgpack, made from the fields of dataclasses and from their annotations.

Nothing here names a field: what is added to a plan travels. An array is its dtype, its shape and its bytes, and must be
what the annotation says. Decoding makes the classes that a codec was made of and nothing else, whatever the bytes are;
pickle would run what they ask for.
"""

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
    """Bytes that are no message of the kinds that were expected: the other side runs another version, or is a
    stranger."""


class Codec(Generic[Message]):
    """To bytes and back, for messages of some dataclasses, which a message names. Arrays come back read-only.

    **Arguments:** `kinds`: the dataclasses, whose fields are numbers, texts, enums, tuples, mappings, arrays with a
    dtype (`NDArray[np.int32]`), further dataclasses, or None. No two have the same name.
    """

    def __init__(self, *kinds: type[Message]) -> None:
        self._names: dict[type, str] = {kind: kind.__name__ for kind in kinds}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
        self._envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind, dec_hook=_from_plain) for kind in kinds}
        self.form = _form(kinds)
        """A digest of the names of all fields: processes whose digests differ do not understand each other."""

    def encode(self, message: Message) -> bytes:
        """Raises `NotImplementedError` for a value that is of none of the types above."""
        return self._encoder.encode((self._names[type(message)], message))

    def decode(self, data: bytes) -> Message:
        """Raises `FrameError`, saying what is wrong with the bytes."""
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
    """What stands on the wire for types that msgpack does not have."""
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
    """The array of a field that is annotated with `kind`.

    **Raises:** `ValueError`, `TypeError`, which `msgspec` reports with the field's path.
    """
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
    """`NDArray[np.int32]` to int32, little-endian as on the wire. Raises `NotImplementedError` for other types."""
    match get_args(kind):
        case (_, dtype) if get_args(dtype):
            found: np.dtype[Any] = np.dtype(get_args(dtype)[0]).newbyteorder("<")
            return found
    raise NotImplementedError(f"{kind} cannot be received from another process")


def _form(kinds: Sequence[type]) -> str:
    lines = sorted({line for kind in kinds for line in _lines(kind)})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines(kind: Any) -> Iterator[str]:
    """`Name: field, ...` of a dataclass and of those in its fields; of a type around dataclasses, theirs."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield f"{kind.__name__}: {', '.join(field.name for field in fields(kind))}"
        for inner in get_type_hints(kind).values():
            yield from _lines(inner)
    else:
        for inner in get_args(kind):
            yield from _lines(inner)
