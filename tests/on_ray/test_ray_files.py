"""Files as rows, without a cluster."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pyarrow as pa
import pytest
from ray.data._internal.execution.interfaces import TaskContext

from sglang_jax.batch.lines import MAX_LINE_BYTES
from sglang_jax.batch.ray import files
from sglang_jax.batch.ray.actors import AttemptBook
from sglang_jax.batch.ray.files import ANSWERS, ERRORS_ENDING, AnswerFiles, blocks_of, read_lines
from sglang_jax.batch.source import FileFormat


@pytest.mark.parametrize("seed", range(20))
def test_lines_end_at_line_feeds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    content = bytes(draw.choice(b"ab\n\n\r\x85\xe2\x80\xa8") for _ in range(draw.randrange(400)))
    monkeypatch.setattr(files, "READ_BYTES", draw.randrange(1, 50))
    expected = content.removesuffix(b"\n").split(b"\n") if content else []
    assert list(read_lines(io.BytesIO(content))) == expected


def test_a_byte_order_mark_is_not_part_of_the_first_line() -> None:
    assert list(read_lines(io.BytesIO(b"\xef\xbb\xbf{}\n\xef\xbb\xbf"))) == [b"{}", b"\xef\xbb\xbf"]


def test_a_line_that_is_too_long_is_dropped_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_LINE_BYTES > files.READ_BYTES
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    monkeypatch.setattr(files, "READ_BYTES", 8)
    content = b"a" * 20 + b"\n" + b"b" * 21 + b"\n" + b"c\n" + b"d" * 50
    assert list(read_lines(io.BytesIO(content))) == [b"a" * 20, None, b"c", None]


def test_blank_lines_are_numbered_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 3)
    tables = list(blocks_of(100, iter([b"aa", b" ", b"bb", b"", None, b"c"])))
    rows = [(row["number"], row["raw"]) for table in tables for row in table.to_pylist()]
    assert rows == [(100, b"aa"), (102, b"bb"), (104, None), (105, b"c")]
    assert len(tables) == 2


def test_an_answered_batch_starts_again_at_attempt_1() -> None:
    book = AttemptBook()
    assert [book.begin("a"), book.begin("b"), book.begin("a"), book.begin("a")] == [1, 1, 2, 3]
    book.finish("a")
    assert book.num_unfinished() == 1
    assert book.begin("a") == 1


def test_a_batch_may_be_answered_twice() -> None:
    """By an actor on a node that was wrongly thought lost, and by its replacement."""
    book = AttemptBook()
    assert [book.begin("a"), book.begin("a")] == [1, 2]
    book.finish("a")
    book.finish("a")
    assert (book.num_unfinished(), book.finished()) == (0, 2)


def test_a_task_that_writes_again_duplicates_no_line(tmp_path: Path) -> None:
    """A line that failed with its actor is answered when the task's node is lost too."""
    files = AnswerFiles(str(tmp_path), FileFormat.JSONL, rows_per_file=1)
    task = TaskContext(3, "write", kwargs={"write_uuid": "run"})
    for failing in ({1}, set(), {0, 1}, {0}, set()):
        columns = [[0, 1], [number in failing for number in (0, 1)], [1, 1], [1, 1], [b"zero\n", b"one\n"]]
        written = files.write([pa.table(columns, schema=ANSWERS)], task)
        assert (written.num_answered, written.num_failed) == (2 - len(failing), len(failing))
        lines = {path.name.endswith(ERRORS_ENDING): path.read_text().split() for path in tmp_path.iterdir()}
        assert lines.get(True, []) == [("zero", "one")[number] for number in sorted(failing)]
        assert lines.get(False, []) == [("zero", "one")[number] for number in (0, 1) if number not in failing]
