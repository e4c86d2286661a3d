"""Answers as files of a folder, on whichever file system: those of a task in one file, those that failed beside it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileType
from ray.data._internal.execution.interfaces import TaskContext
from ray.data.block import Block, BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink, WriteResult

from sglang_jax.batch.parquet import SCHEMA, row_of_line
from sglang_jax.batch.source import FileFormat

ERRORS_ENDING = ".errors.jsonl"
"""How the names of files end that hold lines which failed."""

ANSWERS = pa.schema(
    [
        ("number", pa.int64()),
        ("failed", pa.bool_()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("line", pa.large_binary()),
    ]
)
"""What is written. `number`: see `RequestFiles`; `line`: of the output format, with its end."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, in one file or in all."""

    num_answered: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(
            self.num_answered + other.num_answered,
            self.num_failed + other.num_failed,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )


class AnswerFiles(BlockBasedFileDatasink):  # type: ignore[misc]  # Ray has no types
    """A folder of answers. The name of a file is that of the task that writes it, so a task that is run again, as its
    node was lost, writes the same file again."""

    def __init__(self, path: str, file_format: FileFormat, *, rows_per_file: int) -> None:
        super().__init__(path, min_rows_per_file=rows_per_file, file_format=file_format.value)
        self._answer_format = file_format
        self.written = Written()

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> Written:
        """Runs on any node. Returns what was written."""
        table = pa.concat_tables([BlockAccessor.for_block(block).to_arrow().select(ANSWERS.names) for block in blocks])
        if not table.num_rows:
            return Written()
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
        return Written(answered.num_rows, failed.num_rows, *tokens)

    def on_write_complete(self, write_result: WriteResult[Written]) -> None:
        """Runs in the driver, at the end."""
        self.written = sum(write_result.write_returns, Written())
        super().on_write_complete(write_result)

    def _write_answers(self, path: str, lines: pa.ChunkedArray) -> None:
        if self._answer_format is FileFormat.JSONL:
            self._write_lines(path, lines)
            return
        rows = pa.Table.from_pylist([row_of_line(line.as_py()) for line in lines], SCHEMA)
        with self.open_output_stream(path) as file:
            pq.write_table(rows, file)

    def _remove(self, path: str) -> None:
        """Lines that failed, or were answered, when this task ran before may not do so again."""
        if self.filesystem.get_file_info(path).type is FileType.File:
            self.filesystem.delete_file(path)

    def _write_lines(self, path: str, lines: pa.ChunkedArray) -> None:
        with self.open_output_stream(path) as file:
            for line in lines:
                file.write(line.as_buffer())
