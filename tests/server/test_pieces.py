"""Requests that arrive in pieces: small pieces are read at growing intervals, and every request is read in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from helpers.wire import Wire, connect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_jax.server import sliced_connection
from sglang_jax.server.connections import ConnectionLimits, bounded_connections
from sglang_jax.server.sliced_connection import FIRST_PAUSE, LONGEST_PAUSE, SMALL_PIECE, WHOLE_PIECES

LIMITS = ConnectionLimits(max_connections=8, client_timeout=60.0)
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"
SOON = 1.0
"""Seconds: more than any pause, less than any timeout."""

CHUNKS = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Later:
    """A loop whose timers fire only in `run`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []

    def create_task(self, *arguments: object, **options: object) -> asyncio.Task[None]:
        return self._loop.create_task(*arguments, **options)  # type: ignore[arg-type]  # as asyncio has it

    def call_later(self, seconds: float, what: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        self._waiting.append((seconds, what, arguments))
        return self._loop.call_later(1000, print)  # to be cancelled

    def run(self, most: float) -> list[float]:
        """Fires the timers due within a number of seconds; returns their times."""
        now = [one for one in self._waiting if one[0] <= most]
        self._waiting = [one for one in self._waiting if one[0] > most]
        for _, what, arguments in now:
            what(*arguments)
        return [seconds for seconds, _, _ in now]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    content = json.dumps(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


def open_one() -> tuple[H11Protocol, Wire, Later]:
    connection, wire = connect(bounded_connections(LIMITS), echo)
    later = Later(connection.loop)
    connection.loop = later  # type: ignore[assignment]  # what of it is used
    return connection, wire, later


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEAD, b"X: y\r\n"),
        (HEAD + b"\r\n" + HEAD, b"X: y\r\n"),  # h11 has the start of the second
        (BODY, b"abcdef"),
        (CHUNKS, b"1\r\na\r\n"),
    ],
    ids=["head", "head behind another", "body", "chunks"],
)
async def test_small_pieces_are_read_at_growing_intervals(first: bytes, piece: bytes) -> None:
    connection, wire, later = open_one()
    connection.data_received(first)
    later.run(SOON)  # before the first of two is answered
    await turns()
    pauses = []
    for _ in range(14):
        assert wire.reading
        connection.data_received(piece)
        await turns()
        pauses += [None] if wire.reading else later.run(SOON)
    unpaused = pauses.count(None)
    assert unpaused < WHOLE_PIECES
    assert pauses[:unpaused] == [None] * unpaused
    assert pauses[unpaused:] == [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) for number in range(14 - unpaused)]
    connection.connection_lost(None)


async def test_large_pieces_and_whole_requests_are_read_at_once() -> None:
    connection, wire, _ = open_one()
    for _ in range(3):
        connection.data_received(BODY)
        for _ in range(79):
            connection.data_received(b"a" * (SMALL_PIECE + 101))
            await turns()
            assert wire.reading
        connection.data_received(b"a" * (90_000 - 79 * (SMALL_PIECE + 101) - 1))
        await turns()
        connection.data_received(b"a")
        await turns()
        assert wire.reading
    for _ in range(8):
        connection.data_received(HEAD + b"\r\n")
        await turns()
        assert wire.reading
    assert b"".join(wire.sent).count(b"HTTP/1.1 200") == 11
    connection.connection_lost(None)


async def test_reading_resumes_for_a_head_behind_an_answered_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It started in the slice of the request before it, which was slow to parse: reading paused until the head was
    parsed, and by then the answer was sent and nothing resumed reading."""
    monkeypatch.setattr(sliced_connection, "SLICE_SECONDS", 0.0)
    connection, wire, later = open_one()
    connection._to_measure = 1  # as behind a slow slice
    connection.data_received(HEAD + b"\r\n" + HEAD)
    await turns()
    assert b"".join(wire.sent).count(b"HTTP/1.1 200") == 1
    assert not wire.reading
    later.run(SOON)
    await turns()
    assert wire.reading
    connection.data_received(b"\r\n")
    await turns()
    assert b"".join(wire.sent).count(b"HTTP/1.1 200") == 2
    connection.connection_lost(None)
