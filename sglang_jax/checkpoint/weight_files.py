"""Files that weights lie in, of which parts are read: those of a folder of this machine; for others see `bucket`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.files import check_regular

Bytes = NDArray[Any]
"""uint8, `[bytes]`."""


class WeightFiles(Protocol):
    """Files of one folder by their names."""

    def names(self) -> list[str]:
        """Of all files."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file. Raises `CheckpointError` if there is none of this name."""
        ...

    def read(self, name: str, first: int, last: int) -> Bytes:
        """Bytes `first` to `last` of a file, exclusive. Raises `CheckpointError` if they cannot be read."""
        ...

    def where(self, name: str) -> str:
        """A file as errors name it."""
        ...


class LocalFiles:
    """The files of a folder, memory-mapped: what `read` returns is a view, and read when it is looked at."""

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
        # `ndarray` instead of `memmap`, whose subclass methods would travel on with every slice.
        return np.asarray(self._maps[name][first:last])

    def where(self, name: str) -> str:
        return str(self._folder / name)
