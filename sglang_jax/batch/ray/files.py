"""Reads files of requests as rows, and writes answers to files, on any file system."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem, FileType
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource, WriteResult

from sglang_jax.batch.lines import MAX_LINE_BYTES
from sglang_jax.batch.parquet import READ_ROWS, SCHEMA, row_as_json, row_of_line
from sglang_jax.batch.source import BYTE_ORDER_MARK, FileFormat

LINE_BITS = 40
"""A row's number is its file's number, shifted by this, plus its line's number in the file, both from 0."""

READ_BYTES = 2**20
BLOCK_BYTES = 8 * 2**20
"""Bytes after which a block of rows is emitted, so that large files need no more memory than small ones."""

ROWS = pa.schema([("number", pa.int64()), ("raw", pa.large_binary())])
"""Columns of the input. `raw`: a line of JSON without its end; null if it is longer than `MAX_LINE_BYTES`."""


class RequestFiles(FileBasedDatasource):  # type: ignore[misc]  # Ray has no types
    """Files or folders of requests, all of one format. Lines keep their numbers as long as the list of files is the
    same.

    One task reads each file from start to end, because numbering the lines requires it, and reading is never the
    bottleneck. Lines end only at a line feed, as JSON lines do. (Ray's own reader of text loads a whole file, and also
    splits lines at Unicode separators, which JSON strings may contain.)

    **Raises:** `OSError`, `ValueError` for paths that cannot be read, or of both formats.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(list(paths))
        formats = {FileFormat.of(PurePosixPath(path)) for path in self._paths()}
        if len(formats) > 1:
            raise ValueError(
                "all input files must have the same format, but by their names only some are Parquet; run each "
                "format separately"
            )
        self._file_format = formats.pop()
        self._number_of = {path: number for number, path in enumerate(sorted(self._paths()))}

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes by path, in the order of the files' numbers."""
        sizes = dict(zip(self._paths(), self._file_sizes(), strict=True))
        return {path: int(sizes[path]) for path in self._number_of}

    def _open_input_source(self, filesystem: FileSystem, path: str, **open_args: Any) -> pa.NativeFile:
        """Opens a file. Parquet needs random access."""
        if self._file_format is FileFormat.PARQUET:
            return filesystem.open_input_file(path)
        return super()._open_input_source(filesystem, path, **open_args)

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[Block]:
        first = self._number_of[path] << LINE_BITS
        raws = read_lines(f) if self._file_format is FileFormat.JSONL else read_rows(f)
        yield from blocks_of(first, raws)


def blocks_of(first: int, raws: Iterator[bytes | None]) -> Iterator[pa.Table]:
    """Yields tables of lines, numbered from `first`. Blank lines are counted but left out."""
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
    """Yields the lines of a stream, without their ends; None for one longer than `MAX_LINE_BYTES`."""
    parts: list[bytes] = []
    num_bytes = 0
    at_start = True
    while block := file.read(READ_BYTES):
        if at_start:
            block, at_start = block.removeprefix(BYTE_ORDER_MARK), False
        first, *others = block.split(b"\n")
        num_bytes += len(first)
        if num_bytes <= MAX_LINE_BYTES:
            parts.append(first)
        if others:
            yield b"".join(parts) if num_bytes <= MAX_LINE_BYTES else None
            yield from others[:-1]  # each is shorter than a block
            parts, num_bytes = [others[-1]], len(others[-1])
    if num_bytes:
        yield b"".join(parts) if num_bytes <= MAX_LINE_BYTES else None


def read_rows(file: pa.NativeFile) -> Iterator[bytes]:
    """Yields the rows of a Parquet file as lines of JSON."""
    for batch in pq.ParquetFile(file, pre_buffer=False).iter_batches(READ_ROWS):
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            yield row_as_json(row)


ERRORS_ENDING = ".errors.jsonl"
"""End of the names of files with failed lines."""

ANSWERS = pa.schema(
    [
        ("number", pa.int64()),
        ("failed", pa.bool_()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("line", pa.large_binary()),
    ]
)
"""Columns of the answers. `number`: see `RequestFiles`; `line`: a line of the output format, with its end."""


@dataclass(frozen=True, slots=True)
class WriteTotals:
    """Totals of what was written, in one file or in all."""

    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: WriteTotals) -> WriteTotals:
        return WriteTotals(
            self.num_answered + other.num_answered,
            self.num_failed + other.num_failed,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


class AnswerFiles(BlockBasedFileDatasink):  # type: ignore[misc]  # Ray has no types
    """A folder of answers. Files are named after their tasks, so a task that runs again after the loss of its node
    overwrites its file."""

    def __init__(self, path: str, file_format: FileFormat, *, rows_per_file: int) -> None:
        super().__init__(path, min_rows_per_file=rows_per_file, file_format=file_format.value)
        self._answer_format = file_format
        self.written = WriteTotals()

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> WriteTotals:
        """Writes blocks to a file. Runs on any node. Returns its totals."""
        table = pa.concat_tables([BlockAccessor.for_block(block).to_arrow().select(ANSWERS.names) for block in blocks])
        if not table.num_rows:
            return WriteTotals()
        name = self.filename_provider.get_filename_for_task(ctx.kwargs["write_uuid"], ctx.task_idx)
        path = posixpath.join(self.path, name)
        answered = table.filter(pc.invert(table["failed"]))
        failed = table.filter(table["failed"])
        failed_path = path.removesuffix(f".{self._answer_format}") + ERRORS_ENDING
        if answered.num_rows:
            self._write_answers(path, answered["line"])
        else:
            self._remove(path)
        if failed.num_rows:
            self._write_lines(failed_path, failed["line"])
        else:
            self._remove(failed_path)
        tokens = (pc.sum(table[name], min_count=0).as_py() for name in ("prompt_tokens", "output_tokens"))
        return WriteTotals(answered.num_rows, failed.num_rows, *tokens)

    def on_write_complete(self, write_result: WriteResult[WriteTotals]) -> None:
        """Sums the totals. Runs in the driver, at the end."""
        self.written = sum(write_result.write_returns, WriteTotals())
        super().on_write_complete(write_result)

    def _write_answers(self, path: str, lines: pa.ChunkedArray) -> None:
        if self._answer_format is FileFormat.JSONL:
            self._write_lines(path, lines)
            return
        rows = pa.Table.from_pylist([row_of_line(line.as_py()) for line in lines], SCHEMA)
        with self.open_output_stream(path) as file:
            pq.write_table(rows, file)

    def _remove(self, path: str) -> None:
        """Removes a file of an earlier run of this task, whose lines may have been answered or failed differently."""
        if self.filesystem.get_file_info(path).type is FileType.File:
            self.filesystem.delete_file(path)

    def _write_lines(self, path: str, lines: pa.ChunkedArray) -> None:
        with self.open_output_stream(path) as file:
            for line in lines:
                file.write(line.as_buffer())
