"""The output files are the journal: a line that is in them is finished, however the run that wrote them ended."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.batch.append_file import AppendFile, lines_of
from sglang_jax.batch.journal import Journal, Kind, LineSet, line_id, number_of
from sglang_jax.batch.ordered import OrderedJournal, Spool
from sglang_jax.errors import BatchError

TEXTS = st.text(alphabet=st.sampled_from('ab"\\{}\né\U0001f600'), max_size=12)


def line(number: int, text: str = "") -> bytes:
    return json.dumps({"id": line_id(number), "custom_id": text, "response": None}).encode() + b"\n"


def open_journal(folder: Path) -> Journal:
    return Journal(folder / "out.jsonl", folder / "err.jsonl")


def test_the_id_names_the_line() -> None:
    assert number_of(line(0)) == 0
    assert number_of(line(12345, "x")) == 12345


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\n",
        line(3)[:-1],
        line(3)[:-2] + b"\n",
        b'{"id": 3}\n',
        b'{"id": "batch_req_0"}\n',
        b'{"id": "batch_req_01"}\n',
        b'{"id": "batch_req_x"}\n',
        b'{"custom_id": "x"}\n',
        b"[1]\n",
        b"\x00" * 40 + b"\n",
        b'{"id": "\xff"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_other_text_is_not_a_journal_line(stored: bytes) -> None:
    assert number_of(stored) is None


@given(
    texts=st.lists(st.tuples(st.sampled_from(list(Kind)), TEXTS), min_size=1, max_size=8),
    cuts=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
@settings(deadline=None, max_examples=150)
def test_a_journal_cut_at_any_byte_has_exactly_its_whole_lines(
    texts: list[tuple[Kind, str]], cuts: tuple[int, int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = open_journal(folder)
        for number, (kind, text) in enumerate(texts):
            journal.add(number, kind, line(number, text))
        journal.close()
        whole: dict[Path, list[bytes]] = {}
        for path, cut in zip((folder / "out.jsonl", folder / "err.jsonl"), cuts, strict=True):
            content = path.read_bytes()
            size = cut % (len(content) + 1)
            os.truncate(path, size)
            whole[path] = content[:size].splitlines(keepends=True)
            if whole[path] and not whole[path][-1].endswith(b"\n"):
                whole[path].pop()
        again = open_journal(folder)
        kept = {number_of(stored) for lines in whole.values() for stored in lines}
        assert {number for number in range(len(texts)) if again.is_written(number)} == kept
        assert again.num_written == len(kept)
        for number, (kind, text) in enumerate(texts):  # the next run adds the missing lines
            if number not in kept:
                again.add(number, kind, line(number, text))
        again.close()
        for path, lines in whole.items():
            assert path.read_bytes().startswith(b"".join(lines))
        stored = [entry for path in whole for _, entry in lines_of(path)]
        assert sorted(stored) == sorted(line(number, text) for number, (_, text) in enumerate(texts))


@given(
    order=st.permutations(range(9)),
    segment_bytes=st.sampled_from([1, 150, 10**6]),
    stop=st.integers(0, 9),
    cut=st.integers(0, 10**6),
    which=st.integers(0, 20),
)
@settings(deadline=None, max_examples=200)
def test_an_ordered_run_cut_at_any_byte_of_any_file_ends_in_order(
    order: list[int], segment_bytes: int, stop: int, cut: int, which: int
) -> None:
    """The first run finishes some lines and is cut short; the second one only runs those that are not finished."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spools = folder / "run"
        spools.mkdir()
        journal = open_journal(folder)
        first = OrderedJournal(journal, Spool(spools, journal, segment_bytes=segment_bytes))
        for number in range(9):
            first.expect(number)
        for number in order[:stop]:
            first.add(number, Kind.ERROR if number % 4 == 3 else Kind.OUTPUT, line(number))
        files = [folder / "out.jsonl", folder / "err.jsonl", *sorted(spools.iterdir())]
        victim = files[which % len(files)]
        os.truncate(victim, max(0, victim.stat().st_size - cut % 40))

        journal = open_journal(folder)
        spool = Spool(spools, journal, segment_bytes=segment_bytes)
        second = OrderedJournal(journal, spool)
        asked = []
        for number in range(9):
            if second.is_written(number):
                continue
            finished = second.is_finished(number)
            second.expect(number)
            if not finished:
                asked.append(number)
        missing = set(order[stop:])
        assert missing <= set(asked)
        # One cut of less than 40 bytes tears one line: no other runs again.
        assert len(set(asked) - missing) <= 1
        for number in reversed(asked):
            second.add(number, Kind.ERROR if number % 4 == 3 else Kind.OUTPUT, line(number))
        spool.close()
        journal.close()
        stored = [number_of(entry) for _, entry in lines_of(folder / "out.jsonl")]
        failed = [number_of(entry) for _, entry in lines_of(folder / "err.jsonl")]
        assert stored == [0, 1, 2, 4, 5, 6, 8]
        assert failed == [3, 7]
        assert list(spools.iterdir()) == []


def test_a_line_of_another_run_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(line(0) + b"mine\n" + line(1))
    with pytest.raises(BatchError, match=r"line 2 of .*out\.jsonl"):
        open_journal(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == line(0) + b"mine\n" + line(1)


def test_a_line_that_is_answered_twice_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(line(4))
    (tmp_path / "err.jsonl").write_bytes(line(4))
    with pytest.raises(BatchError, match="has a second response to line 5"):
        open_journal(tmp_path)


def test_lines_of_a_removed_error_file_are_run_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.add(0, Kind.OUTPUT, line(0))
    journal.add(1, Kind.ERROR, line(1))
    journal.close()
    (tmp_path / "err.jsonl").unlink()
    journal = open_journal(tmp_path)
    assert [journal.is_written(number) for number in (0, 1)] == [True, False]
    assert journal.num_errors == 0
    journal.close()


def test_nothing_is_written_after_a_failed_write() -> None:
    full = AppendFile(Path("/dev/full"))
    with pytest.raises(BatchError, match=r"No space left.*same command"):
        full.add(line(0))
    full._descriptor, device = os.open(os.devnull, os.O_WRONLY), full._descriptor
    os.close(device)
    with pytest.raises(BatchError, match="No space left"):
        full.add(line(1))
    full.close()


def test_segments_of_the_spool_are_deleted_once_all_their_lines_are_written(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    spool = Spool(folder, journal, segment_bytes=200)
    ordered = OrderedJournal(journal, spool)
    most = 0
    for start in range(0, 300, 10):
        for number in range(start, start + 10):
            ordered.expect(number)
        for number in reversed(range(start, start + 10)):
            ordered.add(number, Kind.OUTPUT, line(number))
        most = max(most, len(list(folder.iterdir())))
    assert most <= 6
    assert ordered.num_ahead == 0
    spool.close()
    journal.close()
    assert list(folder.iterdir()) == []
    assert [number_of(stored) for _, stored in lines_of(tmp_path / "out.jsonl")] == list(range(300))


@given(st.lists(st.integers(0, 500)))
def test_a_line_set_behaves_like_a_set(numbers: list[int]) -> None:
    lines = LineSet()
    seen: set[int] = set()
    for number in numbers:
        assert lines.add(number) == (number not in seen)
        seen.add(number)
    assert len(lines) == len(seen)
    assert {number for number in range(520) if number in lines} == seen
    assert len(lines._bits) <= 63


@pytest.mark.parametrize("read_bytes", [1, 2, 7, 64])
def test_lines_are_found_for_any_size_of_reads(tmp_path: Path, read_bytes: int) -> None:
    content = b"one\n\n" + b"x" * 100 + b"\nlast"
    (tmp_path / "file").write_bytes(content)
    lines = list(lines_of(tmp_path / "file", read_bytes))
    assert [stored for _, stored in lines] == content.splitlines(keepends=True)
    assert [offset for offset, _ in lines] == [0, 4, 5, 106]
