"""Which replica gets which line, and what happens to lines whose engine was lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.batch_driver import LOST, FakeReplica, Watched, answering, make_driver
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.batch.answers import Answer, Tokens
from sglang_jax.batch.journal import Journal, Kind
from sglang_jax.batch.progress import Figures, RunProgress
from sglang_jax.batch.source import Record
from sglang_jax.errors import EngineDeadError


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "out", tmp_path / "err")) as journal:
        yield journal


def lines(count: int) -> Iterator[Record]:
    return (Record(number, b'{"prompt": "%03d"}' % number) for number in range(count))


def number_in(body: bytes) -> int:
    return int(json.loads(body)["prompt"])


async def test_all_replicas_take_from_one_queue(journal: Journal) -> None:
    """A slow one delays no other: it only keeps its current lines."""
    asked: Counter[int] = Counter()
    everything_else = asyncio.Event()

    def make_app(engine: object) -> ASGIApp:
        index = engine.replica  # type: ignore[attr-defined]

        async def before(body: bytes) -> None:
            asked[index] += 1
            if index == 0:
                await everything_else.wait()
            elif asked[1] == 400 - 8:
                everything_else.set()

        return answering(before=before)

    driver = make_driver(lines(400), journal, make_app)
    await driver.run([FakeReplica(0), FakeReplica(1)])
    assert asked == {0: 8, 1: 392}  # 8 are in flight with 2 rows
    assert journal.num_written == 400


class Fragile:
    """An application whose engine is lost, with all requests in flight, when it gets one of `poison`."""

    def __init__(self, replica: FakeReplica, poison: set[int]) -> None:
        self.asked: list[int] = []
        self.most_at_once = 0
        self.alone: set[int] = set()
        self._replica = replica
        self._poison = poison
        self._now = 0

    def make_app(self, engine: object) -> ASGIApp:
        lost = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            number = number_in((await receive())["body"])
            self.asked.append(number)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            if number in self._poison:
                if self._now == 1:
                    self.alone.add(number)
                self._replica.lose()
                lost.set()
            for _ in range(5):  # the others are in flight meanwhile
                await asyncio.sleep(0)
            self._now -= 1
            answer = answering(500, LOST) if lost.is_set() else answering()

            async def body() -> dict[str, object]:
                return {"type": "http.request", "body": b""}

            await answer(scope, body, send)  # type: ignore[arg-type]

        return app


@pytest.mark.parametrize("retries", [1, 2, 3])
async def test_only_a_line_that_kills_engines_fails_after_its_last_retry_by_itself(
    journal: Journal, retries: int
) -> None:
    replica = FakeReplica(engines=100)
    fragile = Fragile(replica, {30, 77})
    watched = Watched()
    await make_driver(lines(100), journal, fragile.make_app, watcher=watched, max_retries=retries).run([replica])
    counts = Counter(fragile.asked)
    assert counts[30] == counts[77] == retries + 1
    assert fragile.alone == {30, 77}
    failed = [json.loads(answer.line) for answer in watched.answers if answer.kind is Kind.ERROR]
    assert sorted(error["custom_id"] for error in failed) == ["line-31", "line-78"]
    assert all(error["error"]["code"] == "engine_dead" for error in failed)
    assert all(f"the {retries + 1} times" in error["error"]["message"] for error in failed)
    assert journal.num_written == 100
    assert fragile.most_at_once == 8


async def test_without_retries_lines_that_ran_with_it_fail_too(journal: Journal) -> None:
    replica = FakeReplica(engines=100)
    fragile = Fragile(replica, {30})
    await make_driver(lines(100), journal, fragile.make_app, max_retries=0).run([replica])
    assert max(Counter(fragile.asked).values()) == 1
    assert 1 <= journal.num_errors <= 8
    assert journal.num_written == 100


async def test_the_other_replicas_continue_when_one_is_given_up(journal: Journal) -> None:
    replicas = [FakeReplica(0, engines=1), FakeReplica(1, engines=1)]
    fragile = Fragile(replicas[0], {5})

    def make_app(engine: object) -> ASGIApp:
        return fragile.make_app(engine) if engine.replica == 0 else answering()  # type: ignore[attr-defined]

    await make_driver(lines(300), journal, make_app, max_retries=5).run(replicas)
    assert journal.num_written == 300
    assert journal.num_errors == 0  # the other replica's engine survives it


async def test_the_run_ends_when_no_replica_is_left_and_keeps_its_answers(journal: Journal) -> None:
    replicas = [FakeReplica(index, engines=1) for index in range(2)]
    fragile = [Fragile(replica, {50, 51}) for replica in replicas]
    driver = make_driver(
        lines(300), journal, lambda engine: fragile[engine.replica].make_app(engine), max_retries=9, lookahead=16
    )
    with pytest.raises(EngineDeadError, match="is stopped"):
        await driver.run(replicas)
    assert 0 < journal.num_written < 300
    assert journal.num_errors == 0


async def test_a_failed_write_ends_the_run(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, kind: Kind, line: bytes) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(journal, "add", refuse)
    with pytest.raises(OSError, match="the disk is gone"):
        await make_driver(lines(10**9), journal, lambda engine: answering()).run([FakeReplica()])


async def test_an_error_in_the_application_gives_an_error_line(journal: Journal) -> None:
    """Starlette answers with status 500 and re-raises the handler's error."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        number = number_in((await receive())["body"])
        failed = json.dumps({"error": {"message": "the server failed", "code": "internal_error"}}).encode()
        answer = answering(500, failed) if number == 3 else answering()

        async def body() -> dict[str, object]:
            return {"type": "http.request", "body": b""}

        await answer(scope, body, send)  # type: ignore[arg-type]
        if number == 3:
            raise ZeroDivisionError

    await make_driver(lines(10), journal, lambda engine: app).run([FakeReplica()])
    assert (journal.num_written, journal.num_errors) == (10, 1)


class Reading:
    """A source with a position that the test sets."""

    num_read = 0
    share_read = 0.0

    def records(self, skip: object) -> Iterator[Record]:
        raise NotImplementedError


def test_progress_shows_the_done_and_remaining_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    reading = Reading()
    progress = RunProgress(Figures(before=20, failed_before=1), reading, terminal=False, clock=lambda: now)
    reading.num_read, reading.share_read = 50, 0.25
    for kind in (Kind.OUTPUT, Kind.OUTPUT, Kind.ERROR):
        now += 10
        progress.finished(Answer(kind, b"", Tokens(prompt=10, cached=5, output=60)))
    # 23 of 200 are done, three of them in 30 s: 177 are left at 10 s each.
    assert capsys.readouterr().err == "23 of about 200 lines done, 2 failed, 6.0 output tokens/s, ETA 29:30\n"
    reading.num_read, reading.share_read = 30, 1.0
    now += 30
    progress.finished(Answer(Kind.OUTPUT, b"", Tokens(output=0)))
    assert capsys.readouterr().err.startswith("24 of 30 lines done, 2 failed, 3.0 output tokens/s")
    progress.close()
    summary = progress.figures.summary()
    assert summary.startswith("24 lines done (20 by earlier runs), 2 in the error file, 180 output tokens in 60.0 s")
    assert "30 prompt tokens, 50.0 % of them from the prefix cache" in summary


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    reading = Reading()
    progress = RunProgress(Figures(before=2), reading, terminal=True)
    reading.num_read, reading.share_read = 6, 0.5
    progress.finished(Answer(Kind.OUTPUT, b"", Tokens(output=7)))
    progress.close()
    shown = capsys.readouterr().err
    assert "3/12" in shown
    assert "tok/s, 0 failed" in shown
