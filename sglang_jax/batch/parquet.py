"""Parquet input and output with one row per line. Needs pyarrow (the extra `parquet`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Raw

from sglang_jax.batch.append_file import lines_of
from sglang_jax.batch.journal import LineSet, number_of
from sglang_jax.batch.source import Record, Skip
from sglang_jax.errors import BatchError
from sglang_jax.server.durable import sync_folder

READ_ROWS = 256
"""Rows converted to Python objects at a time."""

WRITTEN_BYTES = 32 * 2**20
"""Bytes of answers after which a row group of the output is written."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("custom_id", pa.string()),
        ("status_code", pa.int32()),
        ("request_id", pa.string()),
        ("text", pa.string()),
        ("body", pa.string()),
    ]
)
"""Columns of the output. `text` is the first completion's text, `body` the whole response as JSON."""


class ParquetRows:
    """Rows of a Parquet file as JSON objects. A null counts as a field that is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise BatchError(f"cannot read {path} as Parquet: {error}") from error
        self._num_rows = self._file.metadata.num_rows
        self._num_read = 0

    @property
    def num_read(self) -> int:
        return self._num_read

    @property
    def share_read(self) -> float:
        return self._num_read / self._num_rows if self._num_rows else 1.0

    def records(self, skip: Skip) -> Iterator[Record]:
        """Does not read row groups whose rows are all skipped."""
        for group in range(self._file.metadata.num_row_groups):
            first, count = self._num_read, self._file.metadata.row_group(group).num_rows
            if all(skip(number) for number in range(first, first + count)):
                self._num_read += count
                continue
            for number, row in enumerate(self._rows(group), start=first):
                self._num_read += 1
                if not skip(number):
                    yield Record(number, row_as_json(row))

    def _rows(self, group: int) -> Iterator[dict[str, Any]]:
        try:
            for batch in self._file.iter_batches(READ_ROWS, row_groups=[group]):
                yield from batch.to_pylist(maps_as_pydicts="strict")
        except (OSError, pa.ArrowException) as error:
            raise BatchError(f"cannot read {self._path}: {error}") from error


def row_as_json(row: dict[str, Any]) -> bytes:
    """Converts a row to a line of JSON. A body may be a column of structs, or of JSON texts."""
    fields = _without_nulls(row)
    if isinstance(fields.get("body"), str):
        fields["body"] = Raw(fields["body"].encode())
    return msgspec.json.encode(fields)


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {name: _without_nulls(one) for name, one in value.items() if one is not None}
        case list():
            return [_without_nulls(one) for one in value]
    return value


class _Message(msgspec.Struct):
    content: str | None = None


class _Completion(msgspec.Struct):
    """The part of a response of any of the three routes that contains the text."""

    text: str | None = None
    message: _Message | None = None


class _Body(msgspec.Struct):
    text: str | None = None
    choices: list[_Completion] = []


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Raw


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response


_line = msgspec.json.Decoder(_OutputLine)
_body: msgspec.json.Decoder[_Body | list[_Body]] = msgspec.json.Decoder(_Body | list[_Body])


def row_of_line(line: bytes) -> dict[str, Any]:
    output = _line.decode(line)
    body = bytes(output.response.body)
    return {
        "id": output.id,
        "custom_id": output.custom_id,
        "status_code": output.response.status_code,
        "request_id": output.response.request_id,
        "text": first_text(body),
        "body": body.decode(),
    }


def first_text(body: bytes) -> str | None:
    answer = _body.decode(body)
    first = answer[0] if isinstance(answer, list) else answer
    if not first.choices:
        return first.text
    choice = first.choices[0]
    return choice.text if choice.message is None else choice.message.content


def written_numbers(path: Path) -> LineSet:
    """Returns the numbers of the lines in a Parquet output. Raises `BatchError` if the file is not Parquet."""
    numbers = LineSet()
    if not path.exists():
        return numbers
    try:
        for batch in pq.ParquetFile(path, pre_buffer=False).iter_batches(columns=["id"]):
            for line_id in batch.column(0).to_pylist():
                number = number_of(b'{"id":"%b"}\n' % line_id.encode())
                assert number is not None, f"{path} has a row with the id {line_id!r}"
                numbers.add(number)
    except (OSError, pa.ArrowException) as error:
        raise BatchError(f"cannot read {path} as Parquet: {error}") from error
    return numbers


def write_output(journal: Path, output: Path, draft: Path) -> None:
    """Appends the journal's lines to the output's rows, then removes the journal. The output is replaced at once, so it
    is always complete. If this is interrupted after that, call `drop_merged`. Raises `BatchError` if a file cannot be
    read or written."""
    try:
        with draft.open("wb") as file:
            with pq.ParquetWriter(file, SCHEMA) as writer:
                for table in _old_tables(output):
                    writer.write_table(table)
                for rows in _in_groups(line for _, line in lines_of(journal)):
                    writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(output)
        sync_folder(output.parent)
        journal.unlink()
    except (OSError, pa.ArrowException) as error:
        raise BatchError(f"cannot write {output}: {error}; the responses are kept in {journal}") from error


def drop_merged(journal: Path, written: LineSet) -> None:
    """Removes a journal whose lines are already in the output: either all of them are, or none."""
    _, first = next(lines_of(journal), (0, b""))
    number = number_of(first)
    if number is not None and number in written:
        journal.unlink()


def _old_tables(output: Path) -> Iterator[pa.Table]:
    if output.exists():
        old = pq.ParquetFile(output, pre_buffer=False)
        for group in range(old.metadata.num_row_groups):
            yield old.read_row_group(group).cast(SCHEMA)


def _in_groups(lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for line in lines:
        rows.append(row_of_line(line))
        size += len(line)
        if size >= WRITTEN_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows
