"""A client that leaves takes its request with it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.echo_server import EchoServer, wait_for

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
    assert caplog.records == []  # it is no error


def test_leaving_before_the_first_token_aborts(slow_server: EchoServer) -> None:
    connection = slow_server.send("/v1/completions", {"prompt": LONG, "max_tokens": 2000, "stream": True})
    wait_for(lambda: bool(slow_server.context.in_flight))
    connection.close()
    wait_for(lambda: not slow_server.context.in_flight)
    wait_for(lambda: slow_server.running() == 0)


def test_others_go_on(slow_server: EchoServer) -> None:
    leaving = slow_server.send("/generate", {"text": LONG, "stream": True})
    staying = slow_server.send("/generate", {"text": "stay", "rid": "staying"})
    wait_for(lambda: slow_server.running() == 2)
    leaving.close()
    answer = b""
    while not answer.endswith(b"}}"):
        answer += staying.recv(1000)
    assert b'"text":"stay"' in answer
    staying.close()


def test_a_reader_that_pauses_misses_nothing(slow_server: EchoServer) -> None:
    connection = slow_server.send("/v1/completions", {"prompt": "abcdef", "stream": True})
    wait_for(lambda: slow_server.running() == 1)
    wait_for(lambda: slow_server.running() == 0)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(10)
    texts = [line.split(b'"text":"')[1][:1] for line in received.split(b"\n") if b'"text":"' in line]
    assert b"".join(texts).startswith(b"abcdef")
    connection.close()
