"""An answer counts against the memory limits until it is written, and one whose client has left is not written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
from helpers.echo_server import EchoServer, serve_echo

from sglang_jax.server import native

BODY = {"text": "x" * 1000, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
LOGPROBS = 1000 * 21


class Gate:
    """Blocks all writing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.written = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made, whole = Gate(), native.NativeFormat.whole

    def wait(self: native.NativeFormat, *arguments: object) -> object:
        made.open.wait(20)
        made.written += 1
        return whole(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(native.NativeFormat, "whole", wait)
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with serve_echo() as running:
        yield running


def wait_until(server: EchoServer, least: int, most: int) -> None:
    until = time.monotonic() + 20
    while not least <= server.context._logprobs.count <= most:
        assert time.monotonic() < until, server.context._logprobs.count
        time.sleep(0.01)


def test_logprobs_count_until_they_are_written(server: EchoServer, gate: Gate) -> None:
    answers: list[int] = []

    def ask() -> None:
        with httpx2.Client(timeout=30) as client:
            answers.append(client.post(f"{server.url}/generate", json={**BODY, "sampling_params": {}}).status_code)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for one in askers:
        one.start()
    wait_until(server, 3 * LOGPROBS, 4 * LOGPROBS)
    gate.open.set()
    for one in askers:
        one.join(20)
    assert answers == [200] * 3
    wait_until(server, 0, 0)


def test_answers_of_clients_that_left_are_not_written(server: EchoServer, gate: Gate) -> None:
    clients = [httpx2.Client(timeout=0.5) for _ in range(3)]

    def ask(client: httpx2.Client) -> None:
        with pytest.raises(httpx2.TimeoutException), client:
            client.post(f"{server.url}/generate", json={**BODY, "sampling_params": {}})

    askers = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for one in askers:
        one.start()
    for one in askers:
        one.join(20)
    wait_until(server, 0, 0)
    gate.open.set()
    time.sleep(0.1)
    assert gate.written <= 1, "the one that had begun"
