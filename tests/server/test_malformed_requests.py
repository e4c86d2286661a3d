"""Thousands of wrong requests, made from the OpenAPI description and from valid requests: none causes a 5xx, and no
state is left. `benchmarks/abuse.py --malformed 10000` sends more of them."""

from __future__ import annotations

import http.client
import importlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import load_fake_model

COUNT = 600


@pytest.fixture(scope="module")
def scheduled() -> Iterator[EchoServer]:
    with serve_echo(load_fake_model, client_timeout=2.0, model_path="grammars", grammar_timeout=1.0) as server:
        yield server


@pytest.fixture(scope="module")
def malformed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("malformed")


def answer(port: int, request: Any) -> tuple[int, bytes]:
    """The status and the body; status 0 if the server only closed the connection."""
    if not request.raw:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            headers = {name: value.encode("latin-1") for name, value in request.headers.items()}
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        received = b""
        try:
            raw.sendall(request.body)
            raw.shutdown(socket.SHUT_WR)
            while more := raw.recv(65536):
                received += more
        except (ConnectionResetError, BrokenPipeError):
            pass
    return int(received.split()[1]) if received.startswith(b"HTTP/1.1 ") else 0, received


def test_malformed_requests_are_refused(
    scheduled: EchoServer, malformed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    description = scheduled.http.get("/openapi.json").json()
    requests = list(malformed.malformed_requests(description, COUNT))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: answer(scheduled.port, request), requests))
    for request, (status, body) in zip(requests, answers, strict=True):
        said = f"{request}: {status} {body[:500]!r}"
        assert status < 500 or b"engine_busy" in body, said
        assert b"Traceback" not in body, said
        if status >= 400 and not request.raw and request.method != "HEAD":
            found = json.loads(body)
            error = found if request.path.startswith("/api/") else found["error"]
            what = "error" if request.path.startswith("/api/") else "message"
            assert sorted({*error} - {"type"}) == sorted(["code", "param", what]), said
    statuses = {status for status, _ in answers}
    assert {200, 400, 404, 405, 415} <= statuses
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    wait_for(lambda: not scheduled.context.in_flight and not scheduled.context.in_engine)
    wait_for(lambda: scheduled.engine.stats.num_running == scheduled.engine.stats.num_waiting == 0)
    assert scheduled.http.post("/generate", json={"input_ids": [1, 2, 3]}).status_code == 200
    wait_for(lambda: not [task for task in scheduled.tasks() if "run_asgi" in task])
