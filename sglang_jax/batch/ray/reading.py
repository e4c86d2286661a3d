"""Files of requests as a dataset: a row for each line, whichever file system it lies on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem
from ray.data.block import Block
from ray.data.datasource import FileBasedDatasource

from sglang_jax.batch.lines import MAX_LINE_BYTES
from sglang_jax.batch.parquet import READ_ROWS, row_as_json
from sglang_jax.batch.source import BYTE_ORDER_MARK, FileFormat

LINE_BITS = 40
"""A row's number is that of its file, shifted by this, and that of its line there, both from 0."""

READ_BYTES = 2**20
BLOCK_BYTES = 8 * 2**20
"""Rows are given on once they have so many bytes, so that a large file needs no more memory than a small one."""

ROWS = pa.schema([("number", pa.int64()), ("raw", pa.large_binary())])
"""What is read. `raw` is a line of JSON, without its end; null where it is longer than `MAX_LINE_BYTES`."""


class RequestFiles(FileBasedDatasource):  # type: ignore[misc]  # Ray has no types
    """Files of requests, and folders of them, all of one format. Their lines keep their numbers as long as the list of
    files is the same.

    Each file is read by one task from its beginning to its end: numbering the lines needs that, and reading is never
    what an engine waits for. Lines end where JSON lines end, at a line feed alone. (Ray's own reader of text holds a
    whole file, and also ends lines at the separators that Unicode knows, which JSON may hold in its strings.)

    **Raises:** `OSError`, `ValueError` for paths that cannot be read, or of both formats.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(list(paths))
        formats = {FileFormat.of(PurePosixPath(path)) for path in self._paths()}
        if len(formats) > 1:
            raise ValueError("some of its files are Parquet, by their names, and some are not")
        self._file_format = formats.pop()
        self._number_of = {path: number for number, path in enumerate(sorted(self._paths()))}

    @property
    def files(self) -> dict[str, int]:
        """The files' paths in the order of their numbers, and their sizes in bytes."""
        sizes = dict(zip(self._paths(), self._file_sizes(), strict=True))
        return {path: int(sizes[path]) for path in self._number_of}

    def _open_input_source(self, filesystem: FileSystem, path: str, **open_args: Any) -> pa.NativeFile:
        """Parquet is read from several places."""
        if self._file_format is FileFormat.PARQUET:
            return filesystem.open_input_file(path)
        return super()._open_input_source(filesystem, path, **open_args)

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[Block]:
        first = self._number_of[path] << LINE_BITS
        raws = read_lines(f) if self._file_format is FileFormat.JSONL else read_rows(f)
        yield from blocks_of(first, raws)


def blocks_of(first: int, raws: Iterator[bytes | None]) -> Iterator[pa.Table]:
    """Tables of lines, numbered from `first`. Blank lines count and are left out."""
    numbers: list[int] = []
    kept: list[bytes | None] = []
    size = 0
    for number, raw in enumerate(raws, first):
        if raw is not None and not raw.strip():
            continue
        numbers.append(number)
        kept.append(raw)
        size += len(raw or b"")
        if size >= BLOCK_BYTES:
            yield pa.table([numbers, kept], schema=ROWS)
            numbers, kept, size = [], [], 0
    yield pa.table([numbers, kept], schema=ROWS)


def read_lines(file: pa.NativeFile) -> Iterator[bytes | None]:
    """Lines of a stream, without their ends; None for one longer than `MAX_LINE_BYTES`."""
    begun: list[bytes] = []
    begun_bytes = 0
    at_start = True
    while block := file.read(READ_BYTES):
        if at_start:
            block, at_start = block.removeprefix(BYTE_ORDER_MARK), False
        first, *others = block.split(b"\n")
        begun_bytes += len(first)
        if begun_bytes <= MAX_LINE_BYTES:
            begun.append(first)
        if others:
            yield b"".join(begun) if begun_bytes <= MAX_LINE_BYTES else None
            yield from others[:-1]  # each shorter than what is read at once
            begun, begun_bytes = [others[-1]], len(others[-1])
    if begun_bytes:
        yield b"".join(begun) if begun_bytes <= MAX_LINE_BYTES else None


def read_rows(file: pa.NativeFile) -> Iterator[bytes]:
    """Rows of a Parquet file as lines of JSON."""
    for batch in pq.ParquetFile(file, pre_buffer=False).iter_batches(READ_ROWS):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            yield row_as_json(row)
