"""Safetensors files, memory-mapped: only the bytes that are asked for are read.

The format: 8 bytes of header length, a JSON header of name → dtype, shape, byte range, then the raw tensors
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sglang_jax.checkpoint.reader import Array, Index, whole_index
from sglang_jax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


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
    if not index_file.is_file():
        return None
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index_file} is not a safetensors index with a weight_map: {error!r}") from error
    files = {name: folder / file for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(f"{index_file} names files that are not there: {', '.join(missing)}")
    return files


def _files_without_index(folder: Path) -> list[Path]:
    single = folder / SINGLE_FILE
    if single.is_file():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no .safetensors file in {folder}")
    return files


def _read_header(file: Path) -> dict[str, _Tensor]:
    """The tensors of one file, with byte ranges counted from its start."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} ({size} bytes) is not a safetensors file, or is cut short")
        raw = stream.read(length)
    start = 8 + length
    try:
        header: dict[str, dict[str, Any]] = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor_of(file, entry, start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header: {error!r}") from error
    for name, tensor in tensors.items():
        item = _DTYPES.get(tensor.dtype)
        wanted = tensor.end - tensor.begin if item is None else int(np.prod(tensor.shape)) * item.itemsize
        if tensor.end > size or tensor.end - tensor.begin != wanted:
            raise CheckpointError(
                f"{file} ({size} bytes) is cut short or damaged: {name} {tensor.dtype} {tensor.shape} "
                f"is said to lie at bytes {tensor.begin} to {tensor.end}"
            )
    return tensors


def _tensor_of(file: Path, entry: Mapping[str, Any], start: int) -> _Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            dimensions = tuple(int(size) for size in shape)
            return _Tensor(file, dtype, dimensions, start + begin, start + end)
    raise ValueError(f"an entry lacks dtype, shape or data_offsets: {entry!r}")
