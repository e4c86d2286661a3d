"""Replies that are written in the background, without a server."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator

from sglang_jax.errors import RequestError
from sglang_jax.server.background import BackgroundRuns


class Writer:
    """A reply that notes how it ended."""

    status = "in_progress"

    def failed(self, error: RequestError) -> bytes:
        self.status = "failed"
        return b"failed\n\n"

    def cancel(self) -> None:
        self.status = "cancelled"


async def endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"part\n\n"
        await asyncio.sleep(0.001)


async def one_event() -> AsyncGenerator[bytes, None]:
    yield b"end\n\n"


async def test_a_reply_that_is_cancelled_twice_is_stored_as_cancelled() -> None:
    runs, writer, stored = BackgroundRuns(), Writer(), []

    async def save() -> None:
        await asyncio.sleep(0.01)
        stored.append(writer.status)

    runs.start("a", writer, endless(), save, first=b"", keep_events=False, owner="o", size=1)
    await asyncio.sleep(0.01)
    first = asyncio.create_task(runs.cancel("a"))
    await asyncio.sleep(0.005)
    await asyncio.gather(first, runs.cancel("a"))
    assert stored == ["cancelled"]


async def test_the_events_of_a_reply_stay_but_not_its_request() -> None:
    runs, writer = BackgroundRuns(), Writer()

    async def save() -> None:
        pass

    runs.start("a", writer, one_event(), save, first=b"begin\n\n", keep_events=True, owner="o", size=1)
    assert [event async for event in runs.events("a", -1)] == [b"begin\n\n", b"end\n\n"]
    left = weakref.ref(writer)
    del writer
    await asyncio.sleep(0)
    assert left() is None
    assert [event async for event in runs.events("a", 0)] == [b"end\n\n"]
