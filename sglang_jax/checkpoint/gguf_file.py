"""Reads metadata and the tensor table of GGUF files.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package makes a numpy view for each
vocabulary entry, which takes seconds; this is one pass over the bytes. That package still dequantises the blocks.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from sglang_jax.architectures.files import check_regular
from sglang_jax.errors import CheckpointError, cut, quote

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

Scalar = str | int | float | bool
Value = Scalar | list[str] | list[int] | list[float] | list[bool]
_T = TypeVar("_T")


class _ValueType(IntEnum):
    STRING = 8
    ARRAY = 9


_KNOWN_TYPES = frozenset(kind.value for kind in GGMLQuantizationType)
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` formats of metadata value types; little-endian."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table. `shape`: outermost axis first, as in numpy. If the `gguf` package does not know
    `type_id`, `kind` is None and `num_bytes` 0."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    kind: GGMLQuantizationType | None
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata, under the file's keys (such as `llama.block_count`), and tensor table of a file; `data` maps the
    file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    data: NDArray[np.uint8]

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor, `[..., bytes of a row]`, as a view of the file."""
        rows = tensor.shape[:-1]
        data = self.data[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape((*rows, tensor.num_bytes // max(prod(rows), 1)))

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """A metadata value, or None. Raises `CheckpointError` if it is not a `kind`."""
        value = self.metadata.get(key)
        if kind is float and isinstance(value, int):
            return kind(value)  # type: ignore[call-arg]
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: metadata {key} should be a {kind.__name__}, it is {quote(value)}")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Reads metadata and tensor table; an unchanged file is not parsed again. Raises `CheckpointError` if it is not a
    GGUF file of version 2 or 3, is one part of a split model, or is truncated."""
    check_regular(path)
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _parse(path: Path, _modified: int, size: int) -> GgufFile:
    if size < 24:
        raise CheckpointError(f"{path} ({size} bytes) is not a GGUF file")
    with path.open("rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(buffer)
    magic, version = buffer[:4], struct.unpack_from("<I", buffer, 4)[0]
    if magic != _MAGIC or version not in _VERSIONS:
        raise CheckpointError(f"{path} is not a little-endian GGUF file of version 2 or 3: it begins {buffer[:8]!r}")
    cursor.position = 8
    try:
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_values)}
        table = [_table_entry(cursor) for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise CheckpointError(f"{path} ({size} bytes) is damaged or cut short: {cut(repr(error))}") from error
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts of a model; join them with llama.cpp's "
            "gguf-split --merge"
        )
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, it must be a positive integer")
    start = -(-cursor.position // alignment) * alignment
    tensors = {entry[0]: _place(path, entry, start, size) for entry in table}
    return GgufFile(path, metadata, tensors, np.frombuffer(buffer, dtype=np.uint8))


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, form: str) -> int:
        value: int = struct.unpack_from(f"<{form}", self.buffer, self.position)[0]
        self.position += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self.buffer[self.position : self.position + length]
        if len(raw) < length:
            raise struct.error(f"a string of {length} bytes at {self.position} exceeds the file")
        self.position += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Value:
        if kind == _ValueType.STRING:
            return self.string()
        if kind == _ValueType.ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element == _ValueType.STRING:
                return [self.string() for _ in range(count)]
            return self._numbers(_SCALAR_FORMATS[element], count)
        return self.scalar(_SCALAR_FORMATS[kind])

    def _numbers(self, form: str, count: int) -> list[int]:
        if count > len(self.buffer):
            raise struct.error(f"{count} numbers at {self.position} exceed the file")
        layout = f"<{count}{form}"
        values = struct.unpack_from(layout, self.buffer, self.position)
        self.position += struct.calcsize(layout)
        return list(values)


_Entry = tuple[str, tuple[int, ...], int, int]
"""Name, shape (outermost first), type id, offset from the start of the data."""


def _table_entry(cursor: _Cursor) -> _Entry:
    name = cursor.string()
    axes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, tuple(reversed(axes)), cursor.scalar("I"), cursor.scalar("Q")


def _place(path: Path, entry: _Entry, start: int, size: int) -> GgufTensor:
    name, shape, type_id, offset = entry
    if type_id not in _KNOWN_TYPES:
        return GgufTensor(name, shape, type_id, None, start + offset, 0)
    kind = GGMLQuantizationType(type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise CheckpointError(f"{path}: {name} {shape} cannot be stored as {kind.name} in blocks of {block}")
    num_bytes = prod(shape) // block * block_bytes
    if start + offset + num_bytes > size:
        raise CheckpointError(f"{path} ({size} bytes) is cut short: {name} ends at byte {start + offset + num_bytes}")
    return GgufTensor(name, shape, type_id, kind, start + offset, num_bytes)
