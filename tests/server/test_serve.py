"""The server as a process: start, signals, and the death of its engine."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.echo_server import wait_for
from helpers.engine_fakes import EOS
from helpers.server_process import server

from sglang_jax.config import ServerConfig
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.server.serve import bind, claim, listen, run

pytestmark = pytest.mark.slow

BREAKS, ENDS_THE_PROCESS = EOS + 1, EOS + 2


def refused(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_the_ready_line_and_its_curl_line() -> None:
    with server(model_path="echo", served_model_name="my-model") as running:
        said = running.wait_ready()
        assert "serving my-model" in said
        command = re.search(r"curl (\S+) -H '(\S+): (\S+)' -d '(.*)'", said)
        assert command is not None
        url, header, value, body = command.groups()
        routes = url.replace("/v1/chat/completions", "/docs")
        assert f"Its routes: {routes}" in said
        assert running.http.get(routes).status_code == 200
        documentation = re.search(r"documentation: (\S+)\. Try it", said)
        assert documentation is not None
        assert Path(documentation[1]).read_text().startswith("# Operations")
        assert json.loads(body)["temperature"] == 0  # the first answer is the most likely one
        answer = running.http.post(url, content=body, headers={header: value}).json()
        assert answer["choices"][0]["message"]["content"] == "user: What is the capital of Japan?\n"
        running.signal()
        assert running.wait() == 0
        said = running.process.communicate()[1]
    assert re.findall(r" INFO (Draining|Stopping|Stopped)", said) == ["Stopping", "Stopped"]
    assert said.rstrip().endswith(" INFO Stopped")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    with server(model_path="echo:0.03") as running:
        running.wait_ready()
        with running.http.stream("POST", "/generate", json={"text": "a" * 60, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            running.signal(number)
            wait_for(lambda: running.http.get("/health").status_code == 503)
            assert refused(running.http.get("/health")) == (503, "shutting_down")
            new = running.http.post("/v1/completions", json={"prompt": "a"})
            assert refused(new) == (503, "shutting_down")
            assert "retry-after" in new.headers
            assert running.http.get("/v1/models").status_code == 200
            *_, last, done = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["text"] == "a" * 60
        assert done == "data: [DONE]"
        assert running.wait() == 0
        said = running.process.communicate()[1]
    assert re.findall(r" INFO (Draining: 1|Stopping|Stopped)", said) == ["Draining: 1", "Stopped"]


def test_a_second_signal_stops_at_once() -> None:
    with server(model_path="echo:0.03") as running:
        running.wait_ready()
        body = {"text": "a" * 2000, "sampling_params": {"max_new_tokens": 2000}, "stream": True}
        with running.http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.signal()
            wait_for(lambda: running.http.get("/health").status_code == 503)
            running.signal()
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert running.wait() == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_requests_in_flight_at_the_end_of_a_drain_get_an_error(path: str) -> None:
    """Requests in the queue got no answer, and streams broke off."""
    with (
        server(
            "sleeping_core.launch_sleeping_engines", model_path="sleep:0.05", max_running_requests=1, drain_timeout=1.0
        ) as running,
        ThreadPoolExecutor(4) as threads,
    ):
        running.wait_ready()
        body: dict[str, Any] = {
            "/generate": {"input_ids": [3], "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
            "/v1/completions": {"prompt": [3], "max_tokens": 4000, "ignore_eos": True},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000},
        }[path]
        with running.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            several = {"n": 2} if path != "/generate" else {"input_ids": [[3], [5]]}
            waiting = [
                threads.submit(httpx2.post, f"{running.http.base_url}{path}", json=body | fields, timeout=60)
                for fields in ({}, {"stream": True}, several)
            ]
            wait_for(lambda: running.http.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 4)
            running.signal()
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        for answer in waiting:
            assert refused(answer.result(30)) == (503, "shutting_down")
            assert "retry-after" in answer.result().headers
        assert running.wait() == 0


def test_an_unfinished_body_at_the_end_of_a_drain_is_refused() -> None:
    """Its client got no answer."""
    with server(model_path="echo", drain_timeout=0.5) as running:
        running.wait_ready()
        address = running.http.base_url
        with socket.create_connection((address.host, address.port)) as client:
            client.settimeout(30)
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{"prompt"')
            assert running.http.get("/health").status_code == 200  # by now the server has read the earlier bytes
            running.signal()
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in head.lower()
        error = json.loads(content)["error"]
        assert (error["code"], "only 9 bytes came" in error["message"]) == ("shutting_down", True)
        assert running.wait() == 0


def test_a_signal_while_the_engine_starts() -> None:
    with server(model_path="slow") as running:
        time.sleep(0.7)
        running.signal()
        assert running.wait() in (
            128 + signal.SIGTERM,
            -signal.SIGTERM,
        )  # the second exit status if the signal came during the imports


def test_the_death_of_the_engine() -> None:
    with server(model_path="echo:0.03") as running:
        running.wait_ready()
        port = running.http.base_url.port
        assert port is not None
        waiting = socket.create_connection(("127.0.0.1", port))
        body = json.dumps({"text": "a" * 2000, "sampling_params": {"max_new_tokens": 2000}}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        waiting.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        stream_body = {"prompt": "a" * 2000, "max_tokens": 2000, "stream": True}
        with running.http.stream("POST", "/v1/completions", json=stream_body) as response:
            lines = response.iter_lines()
            next(lines)
            dead = running.http.post("/generate", json={"input_ids": [ENDS_THE_PROCESS]})
            *received, last = [line for line in lines if line]
        answer = b"".join(iter(lambda: waiting.recv(4096), b""))
        assert len(received) < 1000, "the stream ended with the engine, and not with its output"
        waiting.close()
        assert refused(dead) == (500, "engine_dead")
        assert "exited with status 7" in dead.json()["error"]["message"]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert answer.startswith(b"HTTP/1.1 500")
        assert b'"code":"engine_dead"' in answer
        assert running.wait() == 1  # this engine is not restarted, so the service manager must restart the server


def test_a_port_in_use_is_an_error_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use.*--port"):
            run(ServerConfig(model_path="no such model", port=port))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets two sockets bind an address")
def test_the_second_of_two_servers_on_a_port_fails_at_once() -> None:
    """Linux lets both bind it while neither listens; the one that listens last gets the error too."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with claim(first), pytest.raises(ConfigError, match=f"port {port}: another server has this address"):
            run(ServerConfig(model_path="no such model", port=port))
        with bind("127.0.0.1", port) as second, claim(second):
            listen(first)
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
                listen(second)


def test_an_unknown_host() -> None:
    with pytest.raises(ConfigError, match=r"'300\.0\.0\.1' is not an address"):
        bind("300.0.0.1", 0)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("192.0.2.1", 0)  # TEST-NET-1 (RFC 5737): unassigned


def test_an_engine_that_cannot_start_raises_its_error() -> None:
    with pytest.raises(CheckpointError, match="no-such-folder"):
        run(ServerConfig(model_path="/no-such-folder", port=0))


def test_all_processes_write_json_logs_if_asked() -> None:
    """The lines of the front end and of the engine, whose traceback is one line too."""
    with server(model_path="echo", log_format="json", log_level="debug") as running:
        running.wait_ready()
        running.http.get("/health", headers={"X-Request-Id": "mine"})
        running.http.post("/generate", json={"input_ids": [BREAKS]})
        assert running.wait() == 1
        said = [json.loads(line) for line in running.process.communicate()[1].splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT.*[+-]\d\d:\d\d", line["time"]) for line in said)
    assert [line["route"] for line in said if line.get("request_id") == "mine"] == ["/health"]
    [traceback] = [line["exception"] for line in said if line["logger"] == "sglang_jax.engine.core"]
    assert traceback.endswith("RuntimeError: the echo broke")
    assert said[-1]["message"] == "Stopped"
