"""The input as a stream: what counts as a line, how much of it is in memory, and Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_jax.batch.lines import BadLine, Line, parse_line
from sglang_jax.batch.source import FileFormat, JsonLines, Source, open_source
from sglang_jax.errors import BatchError


def read(source: Source, done: set[int] | None = None) -> list[tuple[int, bytes | None]]:
    return [(record.number, record.raw) for record in source.records((done or set()).__contains__)]


@pytest.mark.parametrize("read_bytes", [1, 3, 10, 1000])
def test_lines_have_the_numbers_that_an_editor_shows(tmp_path: Path, read_bytes: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{1}\n\n  \t\r\n{22}\r\n" + b"x" * 9 + b"\n{333}")
    source = JsonLines(path, read_bytes=read_bytes, max_line_bytes=8)
    assert read(source) == [(0, b"{1}"), (3, b"{22}\r"), (4, None), (5, b"{333}")]
    assert (source.num_read, source.share_read) == (4, 1.0)
    assert read(JsonLines(path, read_bytes=read_bytes), {0, 4}) == [(3, b"{22}\r"), (5, b"{333}")]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_last_line_that_is_too_long(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"ok\n" + b"x" * 50 + end)
    assert read(JsonLines(path, read_bytes=7, max_line_bytes=20)) == [(0, b"ok"), (1, None)]
    assert read(JsonLines(path, read_bytes=7, max_line_bytes=50)) == [(0, b"ok"), (1, b"x" * 50)]


def test_an_empty_file_has_no_lines_and_counts_as_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    source = JsonLines(path)
    assert read(source) == []
    assert source.share_read == 1.0


def test_the_share_read_follows_the_lines_and_not_the_blocks(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789\n" * 10)
    source = JsonLines(path)
    records = source.records(lambda number: False)
    for count in range(1, 11):
        next(records)
        assert source.share_read == pytest.approx(count / 10)
        assert source.num_read == count


def test_the_format_follows_the_file_name() -> None:
    names = ["a.jsonl", "a.parquet", "a.PQ", "a", "parquet"]
    assert [FileFormat.of(Path(name)).value for name in names] == ["jsonl", "parquet", "parquet", "jsonl", "jsonl"]


def write_table(path: Path, rows: list[dict[str, object]], *, group: int = 3) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pq.write_table(table, path, row_group_size=group)
    return path


def test_rows_of_parquet_are_lines(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "ho", "name": "Ann"}]
    path = write_table(
        tmp_path / "in.parquet",
        [
            {"custom_id": 1, "prompt": "hi", "max_tokens": 4},
            {"custom_id": None, "prompt": "ho", "max_tokens": None},
            {"custom_id": 3, "messages": messages},
            {"custom_id": 4, "url": "/v1/completions", "body": '{"prompt": "x"}'},
        ],
    )
    lines = []
    for number, raw in read(open_source(path)):
        assert raw is not None
        lines.append(parse_line(number, raw, {}))
    assert all(isinstance(line, Line) for line in lines), lines
    assert [line.custom_id for line in lines] == ["1", "line-2", "3", "4"]
    bodies = [json.loads(line.body) for line in lines if isinstance(line, Line)]
    assert bodies[0] == {"prompt": "hi", "max_tokens": 4}
    assert bodies[1] == {"prompt": "ho"}
    assert bodies[2] == {"messages": [{"role": "user", "content": "hi"}, messages[1]]}
    assert bodies[3] == {"prompt": "x"}


def test_a_column_of_structs_and_one_of_token_ids(tmp_path: Path) -> None:
    rows = [
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": [1, 2, 3], "stop": None, "max_tokens": 2}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": [4], "stop": ["x"], "max_tokens": None}},
    ]
    path = write_table(tmp_path / "in.parquet", rows)
    lines = [parse_line(number, raw or b"", {}) for number, raw in read(open_source(path))]
    assert [json.loads(line.body) for line in lines if isinstance(line, Line)] == [
        {"prompt": [1, 2, 3], "max_tokens": 2},
        {"prompt": [4], "stop": ["x"]},
    ]


def test_finished_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_table(tmp_path / "in.parquet", [{"prompt": str(number)} for number in range(10)])
    source = open_source(path)
    assert [number for number, _ in read(source, {0, 1, 2, 4, 9})] == [3, 5, 6, 7, 8]
    assert (source.num_read, source.share_read) == (10, 1.0)


def test_a_body_that_is_not_json_is_an_error_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "body": ["{", None]}), path)
    lines = [parse_line(number, raw or b"", {}) for number, raw in read(open_source(path))]
    assert isinstance(lines[0], BadLine)
    assert isinstance(lines[1], Line)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_text("{}")
    with pytest.raises(BatchError, match=r"in\.parquet as Parquet"):
        open_source(path)
