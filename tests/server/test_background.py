"""Replies that are written in the background, without a server."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator

import pytest

from sglang_jax.errors import RequestError
from sglang_jax.server import background
from sglang_jax.server.background import BackgroundRuns
from sglang_jax.server.errors import BusyError
from sglang_jax.server.shutdown import SHUTDOWN, Shutdown


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


async def no_save() -> None:
    pass


async def test_memory_for_replies_and_their_events_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_EVENT_BYTES", 25)
    monkeypatch.setattr(background, "MAX_RUNNING_BYTES", 100)
    monkeypatch.setattr(background, "MAX_RUNNING_BYTES_EACH", 10)
    runs = BackgroundRuns()
    for name, owner, size in (("mine", "me", 0), ("a", "o", 45), ("b", "o", 45)):
        first = b"begin\n\n" if owner == "me" else b"beginning\n\n"
        runs.start(name, Writer(), one_event(), no_save, first=first, keep_events=True, owner=owner, size=size)
    runs.check_room("o", 10)
    runs.check_room("other", 10)
    for owner, size in (("o", 11), ("other", 11)):
        with pytest.raises(BusyError, match="90 bytes, and 11 more"):
            runs.check_room(owner, size)
    assert [event async for event in runs.events("mine", -1)] == [b"begin\n\n", b"end\n\n"]
    assert [runs.has_events(name) for name in ("mine", "a", "b")] == [True, False, False]  # the owner with the most
    runs.check_room("o", 100)  # all have ended


async def test_a_reply_that_the_server_stops_is_stored_as_failed() -> None:
    shutdown, runs, writer = Shutdown(), BackgroundRuns(), Writer()
    SHUTDOWN.set(shutdown)
    stored = asyncio.Event()

    async def save() -> None:
        stored.set()

    runs.start("a", writer, endless(), save, first=b"", keep_events=False, owner="o", size=1)
    await asyncio.sleep(0.01)
    shutdown.stop()
    await stored.wait()
    assert writer.status == "failed"


async def test_the_events_of_a_reply_stay_but_not_its_request() -> None:
    runs, writer = BackgroundRuns(), Writer()
    runs.start("a", writer, one_event(), no_save, first=b"begin\n\n", keep_events=True, owner="o", size=1)
    assert [event async for event in runs.events("a", -1)] == [b"begin\n\n", b"end\n\n"]
    left = weakref.ref(writer)
    del writer
    await asyncio.sleep(0)
    assert left() is None
    assert [event async for event in runs.events("a", 0)] == [b"end\n\n"]
