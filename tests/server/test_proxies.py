"""The recipes of deploy/proxy run with the real nginx and Caddy, where these are installed: `make proxy-test` needs
nginx."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from helpers.echo_server import EchoServer, post_bytes, serve_echo, wait_for

PATIENCE = 20


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with serve_echo(model_path="echo:0.02") as server:
        yield server


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def port(request: pytest.FixtureRequest, server: EchoServer) -> Iterator[int]:
    """The port of a proxy in front of the server."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        proxies: Any = importlib.import_module("proxies")
    finally:
        sys.path.pop(0)
    if proxies.program(request.param) is None:
        pytest.skip(f"{request.param} is not installed: {proxies.HOW_TO_INSTALL[request.param]}")
    with proxies.running_proxy(request.param, server.port) as port:
        yield port


@pytest.fixture
def http(port: int) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
        yield http


def test_routes_of_clients_pass_and_those_of_operators_do_not(http: httpx2.Client) -> None:
    assert [http.get(path).status_code for path in ("/health", "/livez", "/readyz", "/v1/models")] == [200] * 4
    assert http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
    inside = ("/flush_cache", "/start_profile", "/abort_request", "/drain_replica")
    assert [http.post(path).status_code for path in inside] == [404] * 4
    assert [http.get(path).status_code for path in ("/metrics", "/server_info", "/v1/../metrics")] == [404] * 3


def test_errors_of_the_server_pass(http: httpx2.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


def test_each_request_has_an_id(http: httpx2.Client) -> None:
    first, second = (http.get("/v1/models").headers["x-request-id"] for _ in range(2))
    assert first
    assert first != second


def test_events_arrive_while_the_output_is_generated(http: httpx2.Client, server: EchoServer) -> None:
    body = {"text": "a" * 100, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: {")
        assert server.running() == 1
        assert "data: [DONE]" in list(events)


def test_a_client_that_leaves_ends_its_request(port: int, server: EchoServer) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(post_bytes("/generate", {"text": "a" * 2000, "stream": True}))
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.running() == 1)
    wait_for(lambda: server.running() == 0)


def test_a_body_above_the_limit_is_refused(http: httpx2.Client, server: EchoServer) -> None:
    size = server.context.config.max_body_bytes
    assert http.post("/v1/completions", content=b"x" * (size + 1)).status_code == 413


def connections_of(server: EchoServer) -> int:
    """The number of connections that this process has accepted as the server."""
    accepted = [one for one in psutil.Process().net_connections() if one.laddr.port == server.port]
    return sum(one.status == psutil.CONN_ESTABLISHED for one in accepted)


@pytest.mark.parametrize("part", [30, -5], ids=["head", "body"])
def test_the_server_sees_a_request_once_it_is_whole(port: int, server: EchoServer, part: int) -> None:
    """Otherwise each of thousands of slow clients would take a connection of the server."""
    sent = post_bytes("/generate", {"text": "abc"})
    open_before = connections_of(server)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(sent[:part])
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert connections_of(server) <= open_before
        connection.settimeout(PATIENCE)
        connection.sendall(sent[part:])
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
