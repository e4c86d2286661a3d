"""Reads safetensors files: only the bytes that are needed; from a bucket, whole rows.

Format: 8 bytes of header length, a JSON header with dtype, shape and byte range by name, then the raw tensors
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ml_dtypes
import msgspec
import numpy as np

from sglang_jax.architectures.files import read_file
from sglang_jax.checkpoint.reader import Array, Index, PlainReader, whole_index
from sglang_jax.checkpoint.weight_files import LocalFiles, WeightFiles
from sglang_jax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_RAW: dict[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Types of quantised values, packed words, and shapes of packed tensors; only `read_raw` reads them."""

_MAX_HEADER_BYTES = 32 << 20
"""The format allows 100 MB, which would need a GB to parse. A header of 100,000 tensors has about 15 MB."""

_FIRST_BYTES = 128 << 10
"""First read of each file, before the length of its header is known."""

_HEADERS_AT_ONCE = 16
_MAX_INDEX_BYTES = 64 << 20

_MAX_NAME = 255
"""Maximum characters of a file's name."""


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Bytes `begin` to `end` of a file, exclusive."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def rows(self, item: int, wanted: slice) -> tuple[int, int, int]:
        """The number of rows in the slice `wanted` of the first axis, and their first and last byte (exclusive).
        `item`: bytes per number."""
        first, last, _ = wanted.indices(self.shape[0])
        row = math.prod(self.shape[1:]) * item
        count = max(last - first, 0)
        return count, self.begin + first * row, self.begin + (first + count) * row


class SafetensorsReader(PlainReader):
    """The tensors of a folder: the files in `model.safetensors.index.json`, or `model.safetensors`, or else all
    `.safetensors` files. `files`: the weights, if they are not in `folder`, which has the index. Raises
    `CheckpointError` naming the file that is missing, truncated, or not in the format."""

    def __init__(self, folder: Path, files: WeightFiles | None = None) -> None:
        self._tensors: dict[str, _Tensor] = {}
        self._files = files or LocalFiles(folder)
        weight_map = _weight_map(folder, self._files)
        self._names = sorted(set(weight_map.values() if weight_map is not None else _without_index(self._files)))
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            for file, start in zip(self._names, pool.map(self._start, self._names), strict=True):
                self._add_file(file, start)
        if weight_map is not None:
            self._check_index(folder, weight_map)
        self._present = frozenset(self._tensors)

    def names(self) -> frozenset[str]:
        return self._present

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorReader.read`. Raises `CheckpointError` for a dtype that is not F32, F16 or BF16."""
        return self._read(name, _DTYPES, index)

    def in_bfloat16(self, name: str) -> bool:
        return self._tensor(name).dtype == "BF16"

    def is_plain(self, name: str) -> bool:
        """Whether `read` can read a tensor. Raises `CheckpointError` if it is missing."""
        return self._tensor(name).dtype in _DTYPES

    def stored_as(self, name: str) -> str:
        """The name of a tensor's dtype: numpy's, or that of the format if no method reads it."""
        tensor = self._tensor(name)
        dtype = _DTYPES.get(tensor.dtype, _RAW.get(tensor.dtype))
        return tensor.dtype if dtype is None else dtype.name

    def without(self, names: Collection[str]) -> SafetensorsReader:
        """The same files without some tensors."""
        other = copy.copy(self)
        other._tensors = {name: tensor for name, tensor in self._tensors.items() if name not in names}
        other._present = frozenset(other._tensors)
        return other

    def renamed(self, names: Mapping[str, str]) -> SafetensorsReader:
        """The same files with only some tensors: new name → name in the files."""
        other = copy.copy(self)
        other._tensors = {name: self._tensors[stored] for name, stored in names.items()}
        other._present = frozenset(other._tensors)
        return other

    def raw_dtype(self, name: str) -> np.dtype | None:
        """The dtype of `read_raw`: int8, uint8, `ml_dtypes.float8_e4m3fn`, int32 or int64; None if it cannot read the
        tensor."""
        return _RAW.get(self._tensor(name).dtype)

    def read_raw(self, name: str, index: Index | None = None) -> Array:
        """Reads a tensor of dtype F8_E4M3, I8, U8, I32 or I64. Raises `CheckpointError` for another dtype."""
        return self._read(name, _RAW, index)

    def _read(self, name: str, dtypes: Mapping[str, np.dtype], index: Index | None) -> Array:
        tensor = self._tensor(name)
        dtype = dtypes.get(tensor.dtype)
        if dtype is None:
            where = self._files.where(tensor.file)
            raise CheckpointError(
                f"{name} in {where} is stored as {tensor.dtype}; supported: {', '.join(sorted(dtypes))}"
            )
        wanted = whole_index(tensor.shape, index)
        if not wanted:
            return self._files.read(tensor.file, tensor.begin, tensor.end).view(dtype).reshape(())
        count, begin, end = tensor.rows(dtype.itemsize, wanted[0])
        rows = self._files.read(tensor.file, begin, end).view(dtype).reshape(count, *tensor.shape[1:])
        return rows[(slice(None), *wanted[1:])]

    def _start(self, file: str) -> bytes:
        return self._files.read(file, 0, min(self._files.size(file), _FIRST_BYTES)).tobytes()

    def _add_file(self, file: str, start: bytes) -> None:
        for name, tensor in _read_header(self._files, file, start).items():
            if name in self._tensors:
                other, here = self._files.where(self._tensors[name].file), self._files.where(file)
                raise CheckpointError(f"{name} is in two files: {other} and {here}")
            self._tensors[name] = tensor

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"no tensor {name} in {', '.join(map(self._files.where, self._names))}")
        return self._tensors[name]

    def _check_index(self, folder: Path, weight_map: Mapping[str, str]) -> None:
        absent = [
            f"{name} (in {file})"
            for name, file in weight_map.items()
            if name not in self._tensors or self._tensors[name].file != file
        ]
        if absent:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names tensors that are missing from their files: {', '.join(absent)}"
            )


def _weight_map(folder: Path, files: WeightFiles) -> dict[str, str] | None:
    index_file = folder / INDEX_FILE
    if not index_file.exists():
        return None
    try:
        weight_map = msgspec.json.decode(read_file(index_file, _MAX_INDEX_BYTES), type=_IndexFile).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index with a weight_map: {error}") from error
    for file in set(weight_map.values()):
        _check_inside(index_file, file)
    missing = sorted(file for file in set(weight_map.values()) if not files.has(file))
    if missing:
        raise CheckpointError(f"{index_file} names files that do not exist: {', '.join(missing)}")
    return weight_map


def _check_inside(index_file: Path, name: str) -> None:
    """Refuses files of other folders, which an index must not name. Links to them are allowed: they were made by a
    person who may write to this folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\x00" in name or not 0 < len(name) <= _MAX_NAME:
        raise CheckpointError(f"{index_file} names a file that is not in its folder: {name[:_MAX_NAME]!r}")


def _without_index(files: WeightFiles) -> list[str]:
    present = files.names()
    if SINGLE_FILE in present:
        return [SINGLE_FILE]
    found = [name for name in present if name.endswith(".safetensors")]
    if not found:
        raise CheckpointError(f"no .safetensors file in {files.where('')}")
    return found


def _read_header(files: WeightFiles, file: str, start: bytes) -> dict[str, _Tensor]:
    """Parses the header of a file; byte ranges are from the start of the file. `start`: its first bytes."""
    size, where = files.size(file), files.where(file)
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{where} ({size} bytes) is not a safetensors file, or is cut short: it says that its header has "
            f"{length} bytes, the limit is {_MAX_HEADER_BYTES}"
        )
    data = 8 + length
    raw = start[8:data]
    if len(start) < data:
        raw += files.read(file, len(start), data).tobytes()
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: _ENTRIES.decode(entry) for name, entry in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} has no valid safetensors header: {error}") from error
    tensors = {name: _tensor_of(file, entry, data) for name, entry in entries.items()}
    for name, tensor in tensors.items():
        item = _DTYPES.get(tensor.dtype, _RAW.get(tensor.dtype))
        wanted = tensor.end - tensor.begin if item is None else math.prod(tensor.shape) * item.itemsize
        if (
            not data <= tensor.begin <= tensor.end <= size
            or min(tensor.shape, default=0) < 0
            or tensor.end - tensor.begin != wanted
        ):
            raise CheckpointError(
                f"{where} ({size} bytes) is cut short or damaged: {name} {tensor.dtype} {tensor.shape} "
                f"should be at bytes {tensor.begin} to {tensor.end}"
            )
    return tensors


_ENTRIES = msgspec.json.Decoder(_Entry)


def _tensor_of(file: str, entry: _Entry, start: int) -> _Tensor:
    begin, end = entry.data_offsets
    return _Tensor(file, entry.dtype, tuple(entry.shape), start + begin, start + end)
