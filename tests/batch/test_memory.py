"""The memory of a run does not grow with its input."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.batch_driver import FakeReplica, answering, make_driver

from sglang_jax.batch.journal import Journal, Sink
from sglang_jax.batch.ordered import OrderedJournal, Spool
from sglang_jax.batch.source import JsonLines, Record

LINE = b'{"prompt": "%06d %s"}'
WINDOW = 64


def generated(count: int) -> Iterator[Record]:
    """Lines whose keys are in a scattered order, generated as they are read."""
    for number in range(count):
        yield Record(number, LINE % (number * 7919 % 1000003, b"x" * 1000))


def peak_of(folder: Path, count: int, *, ordered: bool) -> int:
    """The most bytes allocated at once while a run answers `count` lines."""
    folder.mkdir()
    slow = asyncio.Event()

    async def hold_the_first(body: bytes) -> None:
        """The first line is finished last, or, ordered, once no further line is read."""
        if body.startswith(b'{"prompt":"000000 '):
            await slow.wait()
            return
        nonlocal asked
        asked += 1
        if asked >= (200 if ordered else count - 1):
            slow.set()

    async def run(sink: Sink) -> None:
        driver = make_driver(
            generated(count), sink, lambda engine: answering(before=hold_the_first), lookahead=WINDOW, max_ahead=256
        )
        await driver.run([FakeReplica(rows=4)])

    asked = 0
    with closing(Journal(folder / "out", folder / "err")) as journal:
        (folder / "run").mkdir()
        spool = Spool(folder / "run", journal)
        sink: Sink = OrderedJournal(journal, spool) if ordered else journal
        tracemalloc.start()
        try:
            asyncio.run(run(sink))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert journal.num_written == count
        spool.close()
    return peak


@pytest.mark.parametrize("ordered", [False, True], ids=["as they come", "ordered"])
def test_a_run_needs_no_more_memory_for_a_large_input_than_for_a_small_one(tmp_path: Path, ordered: bool) -> None:
    peak_of(tmp_path / "warm", 600, ordered=ordered)  # for objects that are made once and kept
    small = peak_of(tmp_path / "small", 1500, ordered=ordered)
    large = peak_of(tmp_path / "large", 9000, ordered=ordered)
    # 7500 lines more are 7.5 MB of input by themselves. How full the window gets, and how far ahead lines are read,
    # differs from run to run: in order that is 320 lines, twice over for their keys.
    assert large < small + 1_000_000
    assert large < 2_500_000


def test_a_source_keeps_only_what_it_reads_at_once(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        for _ in range(200):
            file.write(b"y" * 99_999 + b"\n")
        file.write(b"z" * 10_000_000)  # longer than a line may be
    tracemalloc.start()
    try:
        source = JsonLines(path, read_bytes=50_000, max_line_bytes=200_000)
        count = sum(record.raw is not None for record in source.records(lambda number: False))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 200
    assert peak < 1_000_000


@pytest.mark.parametrize("ordered", [False, True], ids=["as they come", "ordered"])
async def test_reading_waits_for_answers(tmp_path: Path, ordered: bool) -> None:
    """All answers (in order: only the first one) are held back for as long as lines are still read."""
    read = stalled_at = 0
    let_go = asyncio.Event()

    def counted() -> Iterator[Record]:
        nonlocal read
        for record in generated(5000):
            read += 1
            yield record

    async def hold(body: bytes) -> None:
        if not ordered or body.startswith(b'{"prompt":"000000 '):
            await let_go.wait()

    async def let_go_once_nothing_is_read() -> None:
        nonlocal stalled_at
        while stalled_at != read or not read:
            stalled_at = read
            await asyncio.sleep(0.2)
        let_go.set()

    with closing(Journal(tmp_path / "out", tmp_path / "err")) as journal:
        (tmp_path / "run").mkdir()
        spool = Spool(tmp_path / "run", journal)
        sink: Sink = OrderedJournal(journal, spool) if ordered else journal
        driver = make_driver(counted(), sink, lambda engine: answering(before=hold), lookahead=WINDOW, max_ahead=256)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run([FakeReplica(rows=4)]))
            tasks.create_task(let_go_once_nothing_is_read())
        spool.close()
        assert journal.num_written == 5000
    # Lines in the engine, in the window, and read at once when there was room for one more.
    assert 16 < stalled_at <= (256 + WINDOW if ordered else 16 + 2 * WINDOW)
