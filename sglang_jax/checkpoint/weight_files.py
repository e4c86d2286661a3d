"""Files of weights in a local folder; for those in a bucket, see `bucket`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.files import check_regular

Bytes = NDArray[Any]
"""uint8, `[bytes]`."""


class WeightFiles(Protocol):
    """Reads byte ranges of the files of a folder."""

    def names(self) -> list[str]: ...

    def has(self, name: str) -> bool: ...

    def size(self, name: str) -> int:
        """Bytes of a file. Raises `CheckpointError` if it does not exist."""
        ...

    def read(self, name: str, first: int, last: int) -> Bytes:
        """Bytes `first` to `last` (exclusive) of a file. Raises `CheckpointError` if they cannot be read."""
        ...

    def where(self, name: str) -> str: ...


class LocalFiles:
    """Memory-mapped local files: `read` returns a view, whose bytes are read when they are accessed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, np.memmap] = {}

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def size(self, name: str) -> int:
        check_regular(self._folder / name)
        return (self._folder / name).stat().st_size

    def read(self, name: str, first: int, last: int) -> Bytes:
        if first == last:
            return np.empty(0, np.uint8)  # an empty file cannot be mapped
        if name not in self._maps:
            self._maps[name] = np.memmap(self._folder / name, dtype=np.uint8, mode="r")
        # As `ndarray`, so that slices are not of the subclass `memmap`.
        return np.asarray(self._maps[name][first:last])

    def where(self, name: str) -> str:
        return str(self._folder / name)
