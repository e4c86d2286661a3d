"""Safetensors files, memory-mapped: only the bytes that are asked for are read.

The format: 8 bytes of header length, a JSON header of name → dtype, shape, byte range, then the raw tensors
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ml_dtypes
import msgspec
import numpy as np

from sglang_jax.architectures.files import check_regular, read_file
from sglang_jax.checkpoint.reader import Array, Index, whole_index
from sglang_jax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 32 << 20
"""The format allows 100 MB, which would take a GB to read. A header of 100,000 tensors has about 15 MB."""

_MAX_INDEX_BYTES = 64 << 20

_MAX_NAME = 255
"""Characters of a file's name."""


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsReader:
    """The tensors of a folder: `model.safetensors.index.json` and its files, or `model.safetensors`, or else every
    `.safetensors` file there.

    **Raises:** `CheckpointError` naming the file that is missing, cut short, or not in the format.
    """

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, _Tensor] = {}
        self._maps: dict[Path, np.memmap] = {}
        weight_map = _weight_map(folder)
        files = sorted(set(weight_map.values())) if weight_map is not None else _files_without_index(folder)
        for file in files:
            for name, tensor in _read_header(file).items():
                if name in self._tensors:
                    raise CheckpointError(f"{name} is in two files: {self._tensors[name].file} and {file}")
                self._tensors[name] = tensor
            self._maps[file] = np.memmap(file, dtype=np.uint8, mode="r")
        if weight_map is not None:
            self._check_index(folder, weight_map)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorReader.read`. Raises `CheckpointError` for a dtype that is not F32, F16 or BF16."""
        tensor = self._tensor(name)
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}; supported: {', '.join(sorted(_DTYPES))}"
            )
        data = self._maps[tensor.file][tensor.begin : tensor.end]
        # `ndarray` instead of `memmap`, whose subclass methods would travel on with every slice.
        values = np.asarray(data).view(dtype).reshape(tensor.shape)
        return values[whole_index(tensor.shape, index)]

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"no tensor {name} in {', '.join(str(file) for file in self._maps)}")
        return self._tensors[name]

    def _check_index(self, folder: Path, weight_map: Mapping[str, Path]) -> None:
        absent = [
            f"{name} (in {file.name})"
            for name, file in weight_map.items()
            if name not in self._tensors or self._tensors[name].file != file
        ]
        if absent:
            raise CheckpointError(f"{folder / INDEX_FILE} names tensors that their files lack: {', '.join(absent)}")


def _weight_map(folder: Path) -> dict[str, Path] | None:
    index_file = folder / INDEX_FILE
    if not index_file.exists():
        return None
    try:
        weight_map = msgspec.json.decode(read_file(index_file, _MAX_INDEX_BYTES), type=_IndexFile).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index with a weight_map: {error}") from error
    for file in set(weight_map.values()):
        _check_inside(index_file, file)
    files = {name: folder / file for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(f"{index_file} names files that are not there: {', '.join(missing)}")
    return files


def _check_inside(index_file: Path, name: str) -> None:
    """A file of another folder is not the checkpoint's, whatever its index says. A link to one is: somebody who may
    write here made it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\x00" in name or not 0 < len(name) <= _MAX_NAME:
        raise CheckpointError(f"{index_file} names a file that is not in its folder: {name[:_MAX_NAME]!r}")


def _files_without_index(folder: Path) -> list[Path]:
    single = folder / SINGLE_FILE
    if single.exists():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no .safetensors file in {folder}")
    return files


def _read_header(file: Path) -> dict[str, _Tensor]:
    """The tensors of one file, with byte ranges counted from its start."""
    check_regular(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} ({size} bytes) is not a safetensors file, or is cut short: it says that its header has "
                f"{length} bytes, the limit is {_MAX_HEADER_BYTES}"
            )
        raw = stream.read(length)
    start = 8 + length
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: _ENTRIES.decode(entry) for name, entry in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error}") from error
    tensors = {name: _tensor_of(file, entry, start) for name, entry in entries.items()}
    for name, tensor in tensors.items():
        item = _DTYPES.get(tensor.dtype)
        wanted = tensor.end - tensor.begin if item is None else math.prod(tensor.shape) * item.itemsize
        if (
            not start <= tensor.begin <= tensor.end <= size
            or min(tensor.shape, default=0) < 0
            or tensor.end - tensor.begin != wanted
        ):
            raise CheckpointError(
                f"{file} ({size} bytes) is cut short or damaged: {name} {tensor.dtype} {tensor.shape} "
                f"is said to lie at bytes {tensor.begin} to {tensor.end}"
            )
    return tensors


_ENTRIES = msgspec.json.Decoder(_Entry)


def _tensor_of(file: Path, entry: _Entry, start: int) -> _Tensor:
    begin, end = entry.data_offsets
    return _Tensor(file, entry.dtype, tuple(entry.shape), start + begin, start + end)
