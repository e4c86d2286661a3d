"""Chunks are written without h11: the same bytes that h11 writes, and only into chunked answers."""

from __future__ import annotations

import asyncio

import pytest
from helpers.wire import connect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_jax.server.connections import ConnectionLimits, bounded_connections

LIMITS = ConnectionLimits(max_connections=8, client_timeout=60.0)
PLAIN, OURS = H11Protocol, bounded_connections(LIMITS)

EVENTS = [b"data: a\n\n", b"", b"x" * 300, b"data: [DONE]\n\n"]
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


def answering(events: list[bytes], headers: list[tuple[bytes, bytes]], status: int, fails: bool) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in events[:-1]:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if fails:
            raise ZeroDivisionError
        await send({"type": "http.response.body", "body": events[-1], "more_body": False})

    return app


async def answer(protocol: type[H11Protocol], app: ASGIApp, requests: list[bytes]) -> tuple[list[bytes], bool]:
    """The bytes that a client receives, and whether the connection was closed afterwards."""
    connection, wire = connect(protocol, app)
    for request in requests:
        connection.data_received(request)
        while connection.tasks:
            await asyncio.sleep(0)
    closed = wire.closing
    connection.connection_lost(None)
    return wire.sent, closed


REQUESTS = {
    "HTTP/1.1": [POST],
    "HTTP/1.0": [b"POST / HTTP/1.0\r\nHost: x\r\nContent-Length: 0\r\n\r\n"],
    "HEAD": [b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "closing": [b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"],
    "two on one connection": [POST, POST],
}


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, []),
        (200, [(b"Content-Length", b"%d" % len(b"".join(EVENTS)))]),
        (200, [(b"transfer-encoding", b"chunked")]),
        (404, []),
    ],
)
@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS)
async def test_chunks_have_the_bytes_that_h11_writes(
    requests: list[bytes], status: int, headers: list[tuple[bytes, bytes]], fails: bool
) -> None:
    app = answering(EVENTS, headers, status, fails)
    (ours, closed), (theirs, closed_by_them) = [await answer(each, app, requests) for each in (OURS, PLAIN)]
    assert b"".join(ours) == b"".join(theirs)
    assert closed == closed_by_them
    assert len(ours) <= len(theirs), "no event takes more writes"


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_chunks(status: int) -> None:
    app = answering([b"", b""], [], status, False)
    (ours, _), (theirs, _) = [await answer(each, app, [POST]) for each in (OURS, PLAIN)]
    assert ours == theirs


async def test_a_slow_client_pauses_the_stream_and_a_lost_one_ends_it() -> None:
    """Without the wait, the server would keep the whole stream in memory for a client that reads nothing."""
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            sent.append(number)

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    connection, wire = connect(OURS, app)
    connection.pause_writing()
    connection.data_received(POST)
    await turns()
    assert not sent
    connection.resume_writing()
    connection.pause_writing()
    await turns()
    before = len(wire.sent)
    assert len(sent) < 4
    wire.closing = True
    connection.connection_lost(None)
    await turns()
    assert sent == [0, 1, 2, 3], "the application is not kept"
    assert len(wire.sent) == before, "nothing is written to who has gone"
