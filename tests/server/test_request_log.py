"""Request ids, answers counted by route and status, and the engine's timing of unstreamed completions."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import load_fake_model
from helpers.tokenized import tokenized

from sglang_jax.engine.types import GenerateInput
from sglang_jax.logs import JsonLines, TextLines
from sglang_jax.server.remote_format import request_headers
from sglang_jax.server.requests_seen import MAX_REQUEST_ID, request_id_of


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The server's log lines during the block, at every level, as parsed JSON."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    handler, server_log = Keep(), logging.getLogger("sglang_jax.server")
    handler.setFormatter(JsonLines("front end"))
    server_log.addHandler(handler)
    level = server_log.level
    server_log.setLevel(logging.DEBUG)
    yield said
    server_log.setLevel(level)
    server_log.removeHandler(handler)


def answered(server: EchoServer) -> dict[tuple[str, str, str], float]:
    """The number of answers by route, method and status."""
    found = re.findall(
        r'^sglang:http_requests_total\{method="(\w+)",route="([^"]+)",status="(\d+)"\} (\S+)$',
        server.http.get("/metrics").text,
        re.MULTILINE,
    )
    return {(route, method, status): float(count) for method, route, status, count in found}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/nowhere", 404), ("POST", "/health", 405), ("POST", "/generate", 400)],
)
def test_a_request_id_is_returned(server: EchoServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path, headers={"X-Request-Id": "order:17/a+b=c@d_e.f-g"})
    assert response.status_code == status
    assert response.headers["x-request-id"] == "order:17/a+b=c@d_e.f-g"


def test_a_stream_has_its_id_too(server: EchoServer) -> None:
    body = {"text": "ab", "stream": True}
    with server.http.stream("POST", "/generate", json=body, headers={"X-Request-Id": "s"}) as response:
        assert response.headers["x-request-id"] == "s"
        assert "[DONE]" in response.read().decode()


def test_a_refusal_before_any_route_has_the_id() -> None:
    with serve_echo(api_key="secret") as server:
        response = server.http.post("/generate", json={"text": "a"}, headers={"X-Request-Id": "r"})
        assert (response.status_code, response.headers["x-request-id"]) == (401, "r")
        foreign = server.http.get("/health", headers={"X-Request-Id": "f"})
        assert foreign.headers["x-request-id"] == "f"
    with serve_echo() as server:
        foreign = server.http.get("/health", headers={"Host": "evil.example", "X-Request-Id": "f"})
        assert (foreign.status_code, foreign.headers["x-request-id"]) == (403, "f")
        assert answered(server)["none", "GET", "403"] == 1


@pytest.mark.parametrize(
    "given", ["", "a" * (MAX_REQUEST_ID + 1), "two words", "line\nbreak", 'quote"', "ümlaut", "a\x1b[31m", "a\n"]
)
def test_an_id_that_would_break_the_log_is_replaced(given: str) -> None:
    ids = {request_id_of(given) for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_an_id_of_the_maximum_length_is_kept() -> None:
    assert request_id_of("a" * MAX_REQUEST_ID) == "a" * MAX_REQUEST_ID


def test_answers_are_counted_by_route_and_status(server: EchoServer) -> None:
    before = answered(server)
    server.http.post("/generate", json={"text": "a"})
    server.http.post("/generate", json={"text": 5})
    for number in range(3):
        server.http.get(f"/nowhere/{number}")
    server.http.request("PROPFIND", "/coffee")
    expected = {
        ("/generate", "POST", "200"): 1,
        ("/generate", "POST", "400"): 1,
        ("none", "GET", "404"): 3,
        ("none", "other", "404"): 1,
    }

    def new() -> dict[tuple[str, str, str], float]:
        return {key: count - before.get(key, 0) for key, count in answered(server).items() if key[0] != "/metrics"}

    wait_for(lambda: {key: count for key, count in new().items() if count} == expected)


def test_a_line_of_the_log_names_its_request(server: EchoServer, lines: list[str]) -> None:
    server.http.get("/nowhere%0A[forged]", headers={"X-Request-Id": "x1"})
    server.http.get("/health", headers={"X-Request-Id": "x2"})

    def ours() -> list[dict[str, Any]]:
        """The answer arrives a moment before its line, and the last line of another test may still come."""
        return [said for said in map(json.loads, lines) if said["request_id"] in ("x1", "x2")]

    wait_for(lambda: len(ours()) == 2)
    first, second = ours()
    assert (first["request_id"], first["status"], first["route"], first["process"]) == ("x1", 404, "none", "front end")
    assert "\n" not in first["message"]
    assert (second["request_id"], second["status"], second["route"]) == ("x2", 200, "/health")
    assert second["seconds"] > 0


def test_an_error_in_the_log_has_its_traceback_in_the_same_object() -> None:
    try:
        raise ValueError("torn")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "it %s", ("broke",), (ValueError, error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["level"], said["message"]) == ("error", "it broke")
    assert said["exception"].endswith("ValueError: torn")
    assert "request_id" not in said


def test_lines_have_a_time_with_its_zone() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "said", (), None)
    zoned = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(rf"\[{zoned}\] INFO replica 1: said", TextLines("replica 1").format(record))
    assert re.fullmatch(zoned, json.loads(JsonLines().format(record))["time"])


@pytest.mark.parametrize(
    ("level", "told"),
    [("DEBUG", ["sglang_jax.x 10", "numba.core 20"]), (logging.WARNING, []), ("INFO", ["numba.core 20"])],
)
def test_debug_lines_of_other_packages_are_not_written(level: str | int, told: list[str]) -> None:
    """In its own process: `configure` does not change logging that is already set up, as it is here."""
    code = f"""
import logging
from sglang_jax import logs

logs.configure({level!r}, as_json=True)
logging.getLogger("numba.core").debug("10")
logging.getLogger("sglang_jax.x").debug("10")
logging.getLogger("numba.core").info("20")
print(logs.own_level())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [f"{line['logger']} {line['message']}" for line in lines] == told
    assert int(done.stdout) == (logging.getLevelName(level) if isinstance(level, str) else level)


def test_without_a_request_there_is_no_header() -> None:
    assert request_headers(tokenized(GenerateInput(prompt=[1]))) == {}


@pytest.mark.parametrize("body", [{}, {"stop": ["never said"]}])
def test_unstreamed_completions_are_timed_by_the_engine(body: dict[str, object]) -> None:
    prompt = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "n": 2, **body},
    }
    with serve_echo(load_fake_model) as server:
        latency = server.http.post("/generate", json=prompt).json()[0]["meta_info"]["e2e_latency"]
        text = server.http.get("/metrics").text
    values = {
        name: float(value) for name, value in re.findall(r'^sglang:(\w+)\{model_name="[^"]+"\} (\S+)$', text, re.M)
    }
    assert values["time_to_first_token_seconds_count"] == values["queue_time_seconds_count"] == 2
    assert values["inter_token_latency_seconds_count"] == 2 * 7
    assert 0 <= values["queue_time_seconds_sum"] <= values["time_to_first_token_seconds_sum"]
    told = values["time_to_first_token_seconds_sum"] + values["inter_token_latency_seconds_sum"]
    assert 0 < told <= values["e2e_request_latency_seconds_sum"] <= 2 * latency


def test_a_route_with_a_parameter_is_counted_as_it_is_documented(server: EchoServer) -> None:
    key = ("/v1/models/{model}", "GET", "200")
    before = answered(server).get(key, 0.0)
    assert server.http.get("/v1/models/echo-model").status_code == 200
    assert answered(server)[key] == before + 1
    assert not [route for route, _, _ in answered(server) if ":" in route]
