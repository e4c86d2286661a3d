"""Each tenant has room whatever the others hold, and short bodies and answers are limited too."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from starlette.types import Message, Receive, Scope, Send

from sglang_jax.engine.types import OutputDelta, TokenLogprob
from sglang_jax.server import logprobs
from sglang_jax.server.callers import Caller, set_caller
from sglang_jax.server.errors import BusyError
from sglang_jax.server.logprobs import HeldLogprobs
from sglang_jax.server.request_body import BODIES_IN_FLIGHT, BodyLimit

MOST = 100_000


class Bodies:
    """Requests of tenants through the limit; a body that has been read runs until `end`."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._limit = BodyLimit(self._application, MOST, 60.0)
        self._tasks: list[asyncio.Task[None]] = []

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scope["statuses"].append(200)
        await self.over.wait()

    async def status(self, tenant: str, size: int) -> int:
        """The status of a body: 200 if it runs."""
        statuses: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        async def answer() -> None:
            set_caller(Caller(tenant))
            headers = [(b"content-length", b"%d" % size)]
            await self._limit(
                {"type": "http", "method": "POST", "path": "/", "headers": headers, "statuses": statuses}, receive, send
            )

        self._tasks.append(asyncio.create_task(answer()))
        while not statuses:
            await asyncio.sleep(0)
        return statuses[0]

    async def end(self) -> None:
        self.over.set()
        await asyncio.gather(*self._tasks)


async def test_a_key_may_send_a_body_while_another_fills_the_server() -> None:
    """A batch of eight large bodies, held while they ran, blocked those of all other keys for minutes."""
    bodies = Bodies()
    assert [await bodies.status("batch", MOST) for _ in range(BODIES_IN_FLIGHT + 1)] == [200] * BODIES_IN_FLIGHT + [503]
    assert [await bodies.status("chat", 70_000) for _ in range(2)] == [200, 503]
    assert await bodies.status("other", MOST) == 200
    await bodies.end()
    bodies.over.clear()
    assert await bodies.status("batch", MOST) == 200
    await bodies.end()
    assert not bodies._limit._held_of


def output(logprobs: int) -> OutputDelta:
    return OutputDelta(
        index=0,
        text="a",
        token_ids=[1],
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        logprobs=[TokenLogprob(1, -1.0)] * logprobs,
    )


def test_the_logprobs_of_thousands_of_short_answers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """None was refused, so four thousand requests could hold 26 GB."""
    monkeypatch.setattr(logprobs, "SHORT_ANSWER", 100)
    monkeypatch.setattr(logprobs, "EXTRA_FOR_SHORT_ANSWERS", 1000)
    held = HeldLogprobs(500)
    with contextlib.ExitStack() as answers:
        long = [answers.enter_context(held.share()) for _ in range(3)]
        for hold in long[:2]:
            hold(output(500))
        with pytest.raises(BusyError, match="1101 logprobs; the limit is 1000"):
            long[2](output(101))
        for _ in range(8):
            answers.enter_context(held.share())(output(100))
        with pytest.raises(BusyError, match="2001 logprobs; the limit is 2000"):
            answers.enter_context(held.share())(output(100))
    assert held.count == 0
