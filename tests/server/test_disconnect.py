"""A client that leaves ends its request, and no state is left."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, post_bytes, wait_for
from starlette.requests import ClientDisconnect
from starlette.types import Message

from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.server.connections import BoundedConnection
from sglang_jax.server.streaming import until_disconnect

LONG = "a" * 2000
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": LONG, "sampling_params": {"max_new_tokens": 2000}}),
    ("/generate", {"text": [LONG] * 3, "sampling_params": {"max_new_tokens": 2000}}),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 2000, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_leaving_aborts(
    slow_server: EchoServer, path: str, body: dict[str, Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    aborted = len(slow_server.aborted())
    connection = slow_server.send(path, {**body, "stream": stream})
    completions = body.get("n", 1) * (len(body["text"]) if isinstance(body.get("text"), list) else 1)
    wait_for(lambda: slow_server.running() == completions)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    connection.close()
    wait_for(lambda: slow_server.running() == 0)
    assert len(slow_server.aborted()) == aborted + completions
    wait_for(lambda: not slow_server.context.in_flight)
    assert caplog.records == []  # leaving is not an error


def test_leaving_before_the_first_token_aborts(slow_server: EchoServer) -> None:
    connection = slow_server.send("/v1/completions", {"prompt": LONG, "max_tokens": 2000, "stream": True})
    wait_for(lambda: bool(slow_server.context.in_flight))
    connection.close()
    wait_for(lambda: not slow_server.context.in_flight)
    wait_for(lambda: slow_server.running() == 0)


def test_other_requests_continue(slow_server: EchoServer) -> None:
    before = len(slow_server.seen())
    leaving = slow_server.send("/generate", {"text": LONG, "stream": True})
    staying = slow_server.send("/generate", {"text": "stay", "rid": "staying"})
    wait_for(lambda: len(slow_server.seen()) == before + 2)
    leaving.close()
    answer = b""
    while not answer.endswith(b"}}"):
        answer += staying.recv(1000)
    assert b'"text":"stay"' in answer
    staying.close()


def test_a_reader_that_pauses_misses_nothing(slow_server: EchoServer) -> None:
    before = len(slow_server.seen())
    connection = slow_server.send("/v1/completions", {"prompt": "abcdef", "stream": True})
    wait_for(lambda: len(slow_server.seen()) == before + 1)
    wait_for(lambda: slow_server.running() == 0)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(10)
    texts = [line.split(b'"text":"')[1].split(b'"')[0] for line in received.split(b"\n") if b'"text":"' in line]
    assert b"".join(texts) == b"abcdef"  # the number of events depends on the reader's pauses
    connection.close()


async def test_a_disconnect_is_received_once() -> None:
    """After a disconnect, ASGI's `receive` returns at once, forever."""
    asked = 0

    async def receive() -> Message:
        nonlocal asked
        asked += 1
        assert asked < 100, "the event loop is kept from turning"
        return {"type": "http.disconnect"}

    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(ClientDisconnect):
        await until_disconnect(receive, work())
    assert asked == 1
    assert cancelled.is_set()


async def test_a_body_message_is_not_a_disconnect() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": True}

    with pytest.raises(RuntimeError, match=r"body was not read to its end: got http\.request"):
        await until_disconnect(receive, asyncio.sleep(30))


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_in_pieces_is_not_a_disconnect(slow_server: EchoServer, stream: bool) -> None:
    body = json.dumps({"text": "hello", "stream": stream}).encode()
    pieces = [body[start : start + 9] for start in range(0, len(body), 9)]
    with socket.create_connection(("127.0.0.1", slow_server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in [*pieces, b""]:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        answer = b""
        while b'"finish_reason":{"type":"stop"' not in answer:
            received = connection.recv(1000)
            assert received, answer
            answer += received


def leave_midway(server: EchoServer, number: int) -> None:
    """Streams a chat and leaves at one of several points, by close or reset, possibly after an earlier chat."""
    path, reads, reset, reuse = "/v1/chat/completions", number % 5, number % 2 == 0, number % 3 == 0
    body: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "stream": True}
    connection = server.send(path, {**body, "max_tokens": 2} if reuse else body)
    if reuse:
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += connection.recv(1000)
        connection.sendall(post_bytes(path, body))
    for _ in range(reads):
        assert connection.recv(100 * number)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_no_state_is_left_after_many_clients_leave(slow_server: EchoServer) -> None:
    wait_for(lambda: slow_server.running() == 0)
    before = slow_server.tasks()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: leave_midway(slow_server, number), range(1, 61)))
    wait_for(lambda: not slow_server.context.in_flight)
    wait_for(lambda: slow_server.running() == 0)
    wait_for(lambda: len(slow_server.tasks()) == len(before))
    assert slow_server.http.get("/health").status_code == 200


def test_a_finished_request_is_freed_without_the_garbage_collector(server: EchoServer) -> None:
    """The answer of a client that reads nothing takes megabytes."""

    def held() -> int:
        kinds = (BoundedConnection, RequestOutputs, Completion)
        # By type: `isinstance` would dereference weak proxies, whose targets may be gone.
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())

    server.http.post("/generate", json={"text": "a"})
    gc.collect()
    gc.disable()
    try:
        before = held()
        with httpx2.Client(base_url=server.url) as http:
            for stream in (False, True):
                http.post("/generate", json={"text": ["ab", "c"], "stream": stream})
                http.post("/v1/completions", json={"prompt": "ab", "n": 2, "stream": stream})
                http.post("/v1/chat/completions", json={"messages": [{"role": "user"}], "stream": stream})
        for _ in range(3):
            server.send("/generate", {"text": "abc" * 50, "stream": True}).close()
        wait_for(lambda: held() <= before)
    finally:
        gc.enable()
