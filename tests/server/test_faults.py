"""A server whose engine is killed or hangs, and clients that read nothing: which requests fail, which continue."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
from helpers.echo_server import post_bytes, wait_for
from helpers.engine_fakes import FAKE_VOCAB_SIZE
from helpers.server_process import Server, server

from sglang_jax.runner.fake_model import Oracle

WATCHDOG_SECONDS = 1.5
PROMPT, SEED, TOKENS = [3, 5, 7], 11, 20


def request(tokens: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": SEED}
    return {"input_ids": PROMPT, "sampling_params": sampling, **fields}


def lose_engine(running: Server, number: signal.Signals) -> tuple[httpx2.Response, dict[str, Any], float]:
    """Sends the engine a signal while it runs one request and has not started another.

    Returns `(answer of the second, last event of the first, seconds until the second was answered)`.
    """
    (pid,) = running.engine_pids()
    with ThreadPoolExecutor(1) as threads:
        with running.http.stream("POST", "/generate", json=request(200, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            waiting: Future[httpx2.Response] = threads.submit(
                httpx2.post, f"{running.http.base_url}/generate", json=request(TOKENS), timeout=60
            )
            wait_for(lambda: running.http.get("/v1/loads").json()["loads"][0]["num_waiting_reqs"] == 1)
            os.kill(pid, number)
            begin = time.monotonic()
            *_, last = [line for line in lines if line.startswith("data: {")]
        assert httpx2.get(f"{running.http.base_url}/livez").status_code == 200
        assert running.http.get("/readyz").status_code == running.http.get("/health").status_code == 503
        answer = waiting.result(60)
    return answer, json.loads(last.removeprefix("data: ")), time.monotonic() - begin


def test_a_lost_engine_is_restarted_until_the_server_gives_up() -> None:
    options = {"model_path": "sleep:0.05", "max_running_requests": 1, "watchdog_timeout": WATCHDOG_SECONDS}
    with server("sleeping_core.launch_sleeping_engines", **options, max_engine_restarts=2) as running:
        running.wait_ready()
        for restarts, number in enumerate((signal.SIGSTOP, signal.SIGKILL), 1):
            (pid,) = running.engine_pids()
            answer, last, _ = lose_engine(running, number)
            assert last["error"]["code"] == "engine_dead"
            assert ("hangs" if number == signal.SIGSTOP else "killed by SIGKILL") in last["error"]["message"]
            assert answer.json()["output_ids"] == Oracle(FAKE_VOCAB_SIZE).output(PROMPT, SEED, TOKENS)
            assert running.http.get("/readyz").status_code == 200
            (load,) = running.http.get("/v1/loads").json()["loads"]
            assert (load["state"], load["restarts"]) == ("serving", restarts)
            assert running.engine_pids() != [pid]
        os.kill(running.engine_pids()[0], signal.SIGKILL)
        assert running.wait() == 1
        assert running.process.stderr is not None
        assert "is not restarted again: it was restarted 2 times in a row" in running.process.stderr.read()


def stalled_stream(running: Server) -> socket.socket:
    """Asks for more output than sockets buffer, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", running.http.base_url.port))
    sampling = {"max_new_tokens": 4000, "n": 8, "ignore_eos": True}
    connection.sendall(post_bytes("/generate", {"text": "a", "sampling_params": sampling, "stream": True}))
    return connection


def in_flight(running: Server) -> int:
    return int(running.http.get("/server_info").json()["internal_states"][0]["running"])


def test_clients_that_read_nothing_are_dropped_and_a_drain_ends() -> None:
    with server(model_path="echo:0.004", client_timeout=1.5, drain_timeout=2.0) as running:
        running.wait_ready()
        with stalled_stream(running):
            wait_for(lambda: in_flight(running) == 8)
            with running.http.stream("POST", "/generate", json={"text": "b" * 100, "stream": True}) as response:
                assert response.read().endswith(b"data: [DONE]\n\n")
            wait_for(lambda: in_flight(running) == 0, 20)
        slow = {"text": "a", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}, "stream": True}
        with running.http.stream("POST", "/generate", json=slow) as response:
            lines = response.iter_lines()
            next(lines)
            running.signal()
            begin = time.monotonic()
            *_, last = [line for line in lines if line]  # cut off, though this client reads
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert running.wait() == 0
            assert time.monotonic() - begin > 1.9


def test_a_drain_does_not_wait_for_clients_that_read_nothing() -> None:
    with server(model_path="echo:0.004", drain_timeout=0.5) as running:
        running.wait_ready()
        with stalled_stream(running):
            wait_for(lambda: in_flight(running) == 8)
            running.signal()
            assert running.wait(30) == 0
