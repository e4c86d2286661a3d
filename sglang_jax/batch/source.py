"""The input file as a stream of numbered records; no more of it is held than is read at once."""

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
"""Whether the record of this number is not needed."""


class FileFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"

    @classmethod
    def of(cls, path: PurePath) -> FileFormat:
        """By the file's name: `.parquet` or `.pq` is Parquet, all else lines of JSON."""
        return cls.PARQUET if path.suffix.lower() in (".parquet", ".pq") else cls.JSONL


@dataclass(frozen=True, slots=True)
class Record:
    """A line or row as a JSON object. `raw` is None where it is longer than `MAX_LINE_BYTES`."""

    number: int
    raw: bytes | None


class Source(Protocol):
    """The input."""

    @property
    def num_read(self) -> int:
        """Lines or rows passed so far, those that were skipped among them."""
        ...

    @property
    def share_read(self) -> float:
        """The part of the input that they are, between 0 and 1."""
        ...

    def records(self, skip: Skip) -> Iterator[Record]:
        """All records in their order but those to be skipped. For one thread at a time.

        **Raises:** `BatchError` if the input cannot be read.
        """
        ...


class JsonLines:
    """Lines of a text file. Blank ones are passed over, but count, so that numbers are those that an editor shows."""

    def __init__(self, path: Path, *, read_bytes: int = READ_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._path = path
        self._read_bytes = read_bytes
        self._max_line_bytes = max_line_bytes
        self._size = path.stat().st_size
        self._position = 0
        self._num_read = 0

    @property
    def num_read(self) -> int:
        """See `Source`."""
        return self._num_read

    @property
    def share_read(self) -> float:
        """See `Source`."""
        return min(1.0, self._position / self._size) if self._size else 1.0

    def records(self, skip: Skip) -> Iterator[Record]:
        """See `Source`."""
        for number, (length, raw) in enumerate(self._lines()):
            self._position += length
            if number == 0 and raw is not None:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            if raw is None or raw.strip():
                self._num_read += 1
                if not skip(number):
                    yield Record(number, raw)

    def _lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Length and content of each line, None for the content of one that is too long to be held."""
        begun: list[bytes] = []  # parts of a line that is not at its end yet
        begun_bytes = 0
        for block in self._blocks():
            start = 0
            while end := block.find(b"\n", start) + 1:
                begun_bytes += end - start
                if begun_bytes > self._max_line_bytes + 1:
                    yield begun_bytes, None
                else:
                    yield begun_bytes, b"".join([*begun, block[start : end - 1]])
                begun, begun_bytes, start = [], 0, end
            begun_bytes += len(block) - start
            if begun_bytes > self._max_line_bytes:
                begun = []
            elif start < len(block):
                begun.append(block[start:])
        if begun_bytes:
            yield begun_bytes, b"".join(begun) if begun_bytes <= self._max_line_bytes else None

    def _blocks(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb", buffering=0) as file:
                while block := file.read(self._read_bytes):
                    yield block
        except OSError as error:
            raise BatchError(f"cannot read {self._path}: {error.strerror}") from error


def open_source(path: Path) -> Source:
    """The input at `path`. Raises `BatchError` for a Parquet file that cannot be read, or not without pyarrow."""
    if FileFormat.of(path) is FileFormat.JSONL:
        return JsonLines(path)
    require_pyarrow(path)
    from sglang_jax.batch.parquet import ParquetRows

    return ParquetRows(path)


def require_pyarrow(path: Path) -> None:
    """Raises `BatchError` where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise BatchError(f"{path} is a Parquet file, which needs pyarrow: {how_to_install('parquet')}")
