"""The received bytes of incomplete requests are held up to a limit for all connections together."""

from __future__ import annotations

import gc
import json
import socket
import weakref
from collections.abc import Iterator

import pytest
from helpers.echo_server import EchoServer, serve_echo
from starlette.types import Message, Receive, Scope, Send

from sglang_jax.errors import RequestError
from sglang_jax.server import request_body
from sglang_jax.server.request_body import REQUEST_BYTES, BodyLimit, PartialRequests

MOST = 10_000


class Client:
    refusal: RequestError | None = None

    def refuse(self, error: RequestError) -> None:
        self.refusal = error


def test_the_oldest_request_that_is_not_short_is_refused() -> None:
    held, clients = PartialRequests(1000, "bodies"), [Client() for _ in range(5)]
    for client, size in zip(clients, (300, 100, 300, 300, 0), strict=True):
        held.hold(client, size)
    assert held.num_bytes == 1000
    held.hold(clients[4], 1)
    assert [client.refusal is not None for client in clients] == [True, False, False, False, False]
    assert held.num_bytes == 701
    assert clients[0].refusal is not None
    assert "bodies of all requests hold 1001 bytes, this one 300; the limit is 1000" in clients[0].refusal.message
    assert (clients[0].refusal.status, clients[0].refusal.code) == (503, "busy")
    held.hold(clients[0], 0)  # its connection is closed
    held.hold(clients[4], 400)
    assert [client.refusal is not None for client in clients] == [True, False, True, False, False]
    for client in clients:
        held.hold(client, 0)
    assert held.num_bytes == 0


def test_silent_requests_do_not_crowd_out_long_ones() -> None:
    """Four thousand clients that sent 8 KiB and stopped had every longer body refused, as it was the longest."""
    held, silent, tiny = PartialRequests(1000, "small bodies"), [Client() for _ in range(100)], Client()
    held.hold(tiny, 1)
    for client in silent:
        held.hold(client, 10)
    for _ in range(20):
        active = Client()
        for size in (8, 16, 24, 32):
            held.hold(active, size)
        held.hold(active, 0)
        assert active.refusal is None
    assert tiny.refusal is None
    refused = [client.refusal is not None for client in silent]
    assert 0 < sum(refused) < 10
    assert refused == sorted(refused, reverse=True)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoServer]:
    monkeypatch.setattr(request_body, "MAX_SMALL_BODIES_BYTES", MOST)
    monkeypatch.setattr(request_body, "REQUEST_BYTES", 0)
    with serve_echo(model_path="echo:0.02") as server:
        yield server


def connect(server: EchoServer, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(sent)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


def refused(connection: socket.socket, what: str) -> None:
    """It gets the error, and is closed."""
    head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    error = json.loads(body)["error"]
    assert error["code"] == "busy"
    assert f"unfinished {what} of all requests hold" in error["message"]
    assert f"the limit is {MOST}" in error["message"]
    connection.close()


def body(size: int) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    content = json.dumps({"prompt": "a", "user": ""}).replace('"user": "', '"user": "' + "x" * (size - 27))
    return f"{head}Content-Length: {size + 1}\r\n\r\n{content}".encode()


def test_the_total_size_of_small_unfinished_bodies_is_limited(server: EchoServer) -> None:
    """64 KiB minus a byte on each of 4,096 connections took 256 MiB."""
    honest = connect(server, body(1000))
    first, second = connect(server, body(4000)), connect(server, body(4000))
    more = connect(server, body(3000))
    refused(first, "small bodies")
    large = connect(server, body(70_000))  # has another limit
    for connection in (honest, second, more, large):
        connection.sendall(b" ")
        assert rest_of(connection).startswith(b"HTTP/1.1 200")
        connection.close()


def test_a_longer_request_displaces_older_ones(server: EchoServer) -> None:
    others = [connect(server, body(3000)) for _ in range(3)]
    last = connect(server, body(3900))
    refused(others.pop(0), "small bodies")
    for connection in (*others, last):
        connection.sendall(b" ")
        assert rest_of(connection).startswith(b"HTTP/1.1 200")
        connection.close()


def test_a_request_that_fills_the_limit_is_refused_itself(server: EchoServer) -> None:
    refused(connect(server, body(12_000)), "small bodies")


def test_a_body_that_has_not_started_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waited for thousands of them, and each request takes memory."""
    monkeypatch.setattr(request_body, "MAX_SMALL_BODIES_BYTES", 3 * REQUEST_BYTES + 1000)
    with serve_echo(model_path="echo:0.02") as server:
        head, _, content = body(1000).partition(b"\r\n\r\n")
        waiting = [connect(server, head + b"\r\n\r\n") for _ in range(4)]
        assert rest_of(waiting.pop(0)).startswith(b"HTTP/1.1 503")
        for connection in waiting:
            connection.sendall(content + b" ")
            assert rest_of(connection).startswith(b"HTTP/1.1 200")
            connection.close()


async def size_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    content = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


async def test_a_refused_body_is_freed_without_the_garbage_collector() -> None:
    """The chunks of a refused body stayed: the error referred to frames that referred to the error."""

    class Chunk(bytearray):
        """A bytes object that can be weakly referenced."""

    kept: list[weakref.ref[Chunk]] = []
    limit = BodyLimit(size_of_body, 100_000, 60.0)
    limit._small = PartialRequests(REQUEST_BYTES + 5000, "small bodies")

    async def receive() -> Message:
        chunk = Chunk(b"x" * 2000)
        kept.append(weakref.ref(chunk))
        return {"type": "http.request", "body": chunk, "more_body": True}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    gc.disable()
    try:
        await limit(
            {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"60000")]}, receive, send
        )
        assert sent[0]["status"] == 503
        assert len(kept) >= 3, "the rest is discarded"
        assert {chunk() for chunk in kept} == {None}
    finally:
        gc.enable()
