"""Reads the input file as a stream of numbered records, one block at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Protocol

from sglang_jax.batch.lines import MAX_LINE_BYTES
from sglang_jax.errors import BatchError, how_to_install

READ_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Skip = Callable[[int], bool]
"""Whether the record of this number is to be skipped."""


class FileFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"

    @classmethod
    def of(cls, path: PurePath) -> FileFormat:
        """Returns the format by the file's name: `.parquet` or `.pq` is Parquet, anything else JSON lines."""
        return cls.PARQUET if path.suffix.lower() in (".parquet", ".pq") else cls.JSONL


@dataclass(frozen=True, slots=True)
class Record:
    """A line or row as a JSON object. `raw` is None if it is longer than `MAX_LINE_BYTES`."""

    number: int
    raw: bytes | None


class Source(Protocol):
    @property
    def num_read(self) -> int:
        """Lines or rows read so far, including skipped ones."""
        ...

    @property
    def share_read(self) -> float:
        """The share of the input that was read, from 0 to 1."""
        ...

    def records(self, skip: Skip) -> Iterator[Record]:
        """Yields all records in order, except those to be skipped. For one thread at a time. Raises `BatchError` if the
        input cannot be read."""
        ...


class JsonLines:
    """Lines of a text file. Blank lines are left out but counted, so that numbers match those in an editor."""

    def __init__(self, path: Path, *, read_bytes: int = READ_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._path = path
        self._read_bytes = read_bytes
        self._max_line_bytes = max_line_bytes
        self._size = path.stat().st_size
        self._position = 0
        self._num_read = 0

    @property
    def num_read(self) -> int:
        return self._num_read

    @property
    def share_read(self) -> float:
        return min(1.0, self._position / self._size) if self._size else 1.0

    def records(self, skip: Skip) -> Iterator[Record]:
        for number, (length, raw) in enumerate(self._lines()):
            self._position += length
            if number == 0 and raw is not None:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            if raw is None or raw.strip():
                self._num_read += 1
                if not skip(number):
                    yield Record(number, raw)

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yields length and content of each line; the content is None if it is too long."""
        parts: list[bytes] = []  # parts of an incomplete line
        num_bytes = 0
        for block in self._blocks():
            start = 0
            while end := block.find(b"\n", start) + 1:
                num_bytes += end - start
                if num_bytes > self._max_line_bytes + 1:
                    yield num_bytes, None
                else:
                    yield num_bytes, b"".join([*parts, block[start : end - 1]])
                parts, num_bytes, start = [], 0, end
            num_bytes += len(block) - start
            if num_bytes > self._max_line_bytes:
                parts = []
            elif start < len(block):
                parts.append(block[start:])
        if num_bytes:
            yield num_bytes, b"".join(parts) if num_bytes <= self._max_line_bytes else None

    def _blocks(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb", buffering=0) as file:
                while block := file.read(self._read_bytes):
                    yield block
        except OSError as error:
            raise BatchError(f"cannot read {self._path}: {error.strerror}") from error


def open_source(path: Path) -> Source:
    """Raises `BatchError` for a Parquet file if it cannot be read or pyarrow is missing."""
    if FileFormat.of(path) is FileFormat.JSONL:
        return JsonLines(path)
    require_pyarrow(path)
    from sglang_jax.batch.parquet import ParquetRows

    return ParquetRows(path)


def require_pyarrow(path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise BatchError(f"{path} is a Parquet file, which needs pyarrow: {how_to_install('parquet')}")
