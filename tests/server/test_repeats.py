"""Memory and pacing of cumulative streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_server import EchoServer

from sglang_jax.server import repeats
from sglang_jax.server.errors import BusyError
from sglang_jax.server.repeats import HeldRepeats, RepeatPace, RepeatShare


def said(size: int) -> dict[str, Any]:
    return {"text": "a" * size, "output_ids": [], "meta_info": {"id": "x", "logprobs": []}}


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(repeats, "MAX_HELD_BYTES", 1000)
    return 1000


def test_the_stream_that_holds_most_is_ended() -> None:
    held = HeldRepeats()
    with held.share() as large, held.share() as small:
        large.add(0, said(500))
        large.add(1, said(200))
        small.add(0, said(300))
        assert held.num_bytes == 1000
        small.add(0, said(1))
        assert held.num_bytes == small.num_bytes == 301
        with pytest.raises(BusyError, match=r"repeats 700 bytes.*all streams 1001; the limit of all is 1000"):
            large.add(1, said(1))
        with pytest.raises(BusyError, match=r"repeats 1101 bytes in its events.*incremental_output"):
            small.add(1, said(800))
        assert held.num_bytes == 0
    assert held.num_bytes == 0


def test_ended_streams_are_no_longer_held() -> None:
    held = HeldRepeats()
    with held.share() as share:
        for index in range(20):
            share.add(index, said(600))
            share.drop(index)
        share.add(0, said(900))
    with held.share() as share:
        share.add(0, said(900))
    assert held.num_bytes == 0


def test_a_stream_that_is_ended_while_its_client_is_slow_frees_what_it_holds() -> None:
    """Its generator waits in the middle of an event."""
    held = HeldRepeats()
    with held.share() as slow, held.share() as other:
        slow.add(0, said(900))
        answer = slow._answers[0]
        other.add(0, said(101))
        assert slow.refusal is not None
        assert len(answer._text) == 0


CALL: dict[str, Any] = {
    "input_ids": [[65] * 50] * 12,
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "sampling_params": {"max_new_tokens": 1},
}


@pytest.mark.usefixtures("limit")
def test_a_completion_that_has_ended_is_not_held(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """131 prompts of 8,000 tokens with all their logprobs held 600 MB until the end of the stream."""
    most: list[int] = []
    add = RepeatShare.add

    def noted(self: RepeatShare, index: int, answer: dict[str, Any]) -> dict[str, Any]:
        added = add(self, index, answer)
        most.append(self.num_bytes)
        return added

    monkeypatch.setattr(RepeatShare, "add", noted)
    monkeypatch.setattr(repeats, "MAX_HELD_BYTES", 2**20)
    events = server.events("/generate", CALL)
    last = [event for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(event["index"] for event in last) == list(range(12))
    assert all(len(event["meta_info"]["input_token_logprobs"]) == 50 for event in last)
    assert max(most) < 2 * min(most)


def test_a_stream_over_the_limit_ends_with_an_error(
    slow_server: EchoServer, server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = server.http.post("/generate", json={**CALL, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
    assert len(server.events("/generate", {**CALL, "incremental_output": True})) == 12
    monkeypatch.setattr(repeats, "MAX_HELD_BYTES", 30)
    first, *_, last = lines_of(slow_server, {"text": "a" * 20})
    assert json.loads(first)["text"].startswith("a")
    assert "the limit of all is 30" in json.loads(last)["error"]["message"]
    assert len(slow_server.events("/generate", {"text": "a" * 5})) > 1


def lines_of(server: EchoServer, body: dict[str, Any]) -> list[str]:
    text = server.http.post("/generate", json={**body, "stream": True}).text
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_a_stream_that_ends_within_an_event_sends_the_error_in_another(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "MAX_HELD_BYTES", 2**20)

    def pieces(self: RepeatShare, index: int, data: bytes) -> Iterator[bytes]:
        yield b"data: {"
        self.refuse(BusyError("for others"))
        yield b"..."

    monkeypatch.setattr(RepeatShare, "pieces", pieces)
    first, last = lines_of(server, {"text": "a"})
    assert first == "{..."
    assert json.loads(last)["error"]["message"] == "for others"


class Waits:
    """Stands in for `asyncio.sleep` of a pace. A stream that must stay paused waits forever."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.stay = True

    async def sleep(self, seconds: float) -> None:
        if self.stay:
            await asyncio.Event().wait()
        self.pauses.append(seconds)


async def waited(others: list[str], whose: str, size: int) -> float:
    """How long one caller's stream waits while others stream events of a megabyte each."""
    waits = Waits()
    pace = RepeatPace(waits.sleep)
    tasks = [asyncio.create_task(pace.after(2**20, other)) for other in others]
    await asyncio.sleep(0)
    waits.stay = False
    await pace.after(size, whose)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not pace._waiting
    assert max(waits.pauses, default=0.0) <= repeats.LONGEST_PAUSE
    return sum(waits.pauses)


async def test_callers_and_their_streams_share_the_rate_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams shared one clock that every event advanced: a stream of short events waited as long as one of long
    events."""
    monkeypatch.setattr(repeats, "REPEATED_BYTES", 100_000)
    assert await waited([], "a", 20_000) == pytest.approx(0.2)
    assert await waited(["b"] * 50, "a", 20_000) == pytest.approx(0.4)
    assert await waited(["b", "c", "b"], "a", 20_000) == pytest.approx(0.6)
    assert await waited(["a"] * 4, "a", 20_000) == pytest.approx(1.0)
    assert await waited(["a", "b"], "a", 200_000) == pytest.approx(8.0)
    assert await waited(["a", "b"], "a", repeats.SHORT_EVENT) == 0.0


async def test_all_streams_together_keep_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "REPEATED_BYTES", 100_000)
    clock = Clock()
    pace, sent = RepeatPace(clock.sleep), 0

    async def stream(whose: str, size: int) -> None:
        nonlocal sent
        while True:
            sent += size
            await pace.after(size, whose)

    sizes = [("a", 20_000), ("a", 90_000), ("b", 500_000), ("c", 17_000)]
    tasks = [asyncio.create_task(stream(*one)) for one in sizes]
    await clock.run_until(1000.0)
    assert sent == pytest.approx(100_000 * 1000.0, rel=0.02)
    for task in tasks:
        task.cancel()


class Clock:
    """Time that passes when every stream waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, asyncio.Future[None]]] = []

    async def sleep(self, seconds: float) -> None:
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self.now + seconds, until))
        await until

    async def run_until(self, end: float) -> None:
        while self.now < end:
            for _ in range(3):
                await asyncio.sleep(0)
            first = min(self._waiting, key=lambda one: one[0])
            self._waiting.remove(first)
            self.now = first[0]
            first[1].set_result(None)
