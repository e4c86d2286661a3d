"""Attacks outside the usual lists: bytes that parsers read differently, small requests for large answers, health
checks of a full server."""

from __future__ import annotations

import http.client
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_server import EchoServer, post_bytes, serve_echo, wait_for
from helpers.engine_fakes import ByteTokenizer, load_fake_model

from sglang_jax.engine import validation
from sglang_jax.server import connections, logprobs
from sglang_jax.server.connections import HEALTH_CONNECTIONS, MAX_HEAD_LINES
from sglang_jax.server.requests_seen import RequestsSeen

JSON = {"Content-Type": "application/json"}


def refused(server: EchoServer, path: str, content: bytes) -> dict[str, Any]:
    response = server.http.post(path, content=content, headers=JSON)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def whole_answer(server: EchoServer, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(sent)
        received = b""
        while more := connection.recv(65536):
            received += more
    return received


# -- Bytes that are not JSON
# -------------------------------------------------------------------------------------------


HALF_A_PAIR = b"\xed\xa0\x80"
"""U+D800 encoded as UTF-8 would be if it were a character: Python's JSON parser accepts it."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "a%b"}'),
        ("/v1/completions", b'{"prompt": "a", "%b": 5}'),
        ("/v1/completions", b'{"prompt": "a", "user": "%b"}'),
        ("/generate", b'{"text": "a", "rid": "%b"}'),
        ("/generate", b'{"text": "a", "extra_key": "%b"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "%b"}]}'),
        ("/open_session", b'{"session_id": "%b"}'),
    ],
)
@pytest.mark.parametrize("padding", [0, 70_000])
def test_a_lone_surrogate_in_utf_8_is_refused(server: EchoServer, path: str, body: bytes, padding: int) -> None:
    """It was a 500 on some routes, and an answer that could not be encoded on others. Long bodies are parsed in a
    thread."""
    error = refused(server, path, body % HALF_A_PAIR + b" " * padding)
    assert error["code"] == "malformed_json"
    assert "the bytes are not UTF-8" in error["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_json_is_utf_8(server: EchoServer, encoding: str) -> None:
    """The bracket counter reads ASCII: in UTF-16 an escaped quote hid everything after it."""
    deep = "[" * 900 + "]" * 900
    text = f'{{"user": "\\"", "prompt": "a", "metadata": {deep}}}'
    assert refused(server, "/v1/completions", text.encode(encoding))["code"] in ("malformed_json", "body_too_complex")


def test_a_byte_order_mark_is_accepted(server: EchoServer) -> None:
    response = server.http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "abc"}', headers=JSON)
    assert response.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("padding", [0, 70_000])
def test_a_number_with_too_many_digits_is_refused(server: EchoServer, padding: int) -> None:
    """In a long body it was a 500."""
    head = b'{"prompt": "a", "max_tokens": ' + b" " * padding
    error = refused(server, "/v1/completions", head + b"1" * 5000 + b"}")
    assert error["code"] == "malformed_json"
    assert f"an integer has more than 4300 digits at character {len(head)}" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "logit_bias", "min_p", "unknown"])
def test_numbers_that_are_not_finite_are_refused(server: EchoServer, field: str, number: str) -> None:
    value = f'{{"5": {number}}}' if field == "logit_bias" else number
    error = refused(server, "/v1/completions", f'{{"prompt": "a", "{field}": {value}}}'.encode())
    assert error["param"].startswith(field)


def test_the_last_of_a_duplicate_field_counts_and_is_checked(server: EchoServer) -> None:
    """A proxy that checks the first value must not let more pass than the server checks."""
    twice = b'{"prompt": "abc", "max_tokens": 1, "max_tokens": %b}'
    response = server.http.post("/v1/completions", content=twice % b"2", headers=JSON)
    assert response.json()["choices"][0]["text"] == "ab"
    assert refused(server, "/v1/completions", twice % b"-2")["param"] == "max_tokens"


@pytest.mark.parametrize("behind", [b'{"prompt": "b"}', b"\x00", b"]", b"0"])
def test_nothing_may_follow_a_body_s_json(server: EchoServer, behind: bytes) -> None:
    assert refused(server, "/v1/completions", b'{"prompt": "a"}' + behind)["code"] == "malformed_json"


# -- Heads -------------------------------------------------------------------------------------------------------------


def test_the_number_of_header_lines_is_limited(server: EchoServer) -> None:
    """Eight thousand lines fit into a head's size limit."""
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = whole_answer(server, first + b"a:\r\n" * (MAX_HEAD_LINES - 4) + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    answer = whole_answer(server, first + b"a:\r\n" * 8000 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"128 lines" in answer


def test_the_header_lines_of_a_pipelined_request_are_limited_too(server: EchoServer) -> None:
    """It ends the connection: an error could be taken for the answer to the request before."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    body = post_bytes("/generate", {"text": "a"})
    assert whole_answer(server, body + head + b"a:\r\n" * 1000 + b"\r\n" + head + b"\r\n") == b""


@pytest.mark.parametrize("version", ["abc", "1.x", "9" * 5000, "1.0.0.0.0.0", ""])
@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_a_scraper_with_an_unknown_openmetrics_version(server: EchoServer, kind: str, version: str) -> None:
    """It was a 500."""
    response = server.http.get("/metrics", headers={"Accept": f"{kind}; version={version}, text/plain;version=0.0.4"})
    assert response.status_code == 200
    assert "sglang:num_running_reqs" in response.text
    usual = server.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert usual.headers["content-type"].startswith("application/openmetrics-text")


def test_a_forwarded_client_address_cannot_inject_log_lines(
    server: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy on the same machine is trusted, but may pass on any client's header, and terminals interpret logged
    bytes."""
    caplog.set_level(logging.DEBUG, RequestsSeen.__module__)
    for said in (b"\x1b[2Jgone", b"a" * 20_000, b"203.0.113.9"):
        sent = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Forwarded-For: %b\r\n\r\n" % said
        malformed = b"\x1b" in said
        assert whole_answer(server, sent).startswith(b"HTTP/1.1 400" if malformed else b"HTTP/1.1 200")
    lines = [record.getMessage() for record in caplog.records if "/health" in record.getMessage()]
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert "203.0.113.9" in lines[1]


# -- A server that is full ---------------------------------------------------------------------------------------------


def status(server: EchoServer, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_health_and_metrics_of_a_full_server_are_answered() -> None:
    """They were refused: its manager took the full server for a failed one and restarted it, losing all requests."""
    with serve_echo(model_path="echo:0.02", max_connections=3) as server:
        working = [server.send("/generate", {"text": "a" * 2000, "stream": True}) for _ in range(3)]
        wait_for(lambda: server.running() == 3)
        assert [status(server, path) for path in ("/health", "/livez", "/readyz")] == [200] * 3
        assert [status(server, path) for path in ("/v1/models", "/health_generate", "/docs")] == [503] * 3
        watcher = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        watcher.request("GET", "/health")
        assert watcher.getresponse().read() == b'{"status":"ok"}'
        for connection in working:
            connection.close()
        wait_for(lambda: status(server, "/v1/models") == 200)
        watcher.request("GET", "/v1/models")  # its connection counts like any other by now
        assert watcher.getresponse().status == 200
        watcher.close()


def test_silent_connections_do_not_block_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest idle connection is closed for a new one beyond the limit too."""
    monkeypatch.setattr(connections, "HEALTH_CONNECTIONS", 4)
    with serve_echo(model_path="echo:0.02", max_connections=2) as server:
        working = [server.send("/generate", {"text": "a" * 2000, "stream": True}) for _ in range(2)]
        wait_for(lambda: server.running() == 2)
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(9)]
        # Long before their timeout, with the reason.
        assert all(one.recv(4096).startswith(b"HTTP/1.1 503") for one in silent[:5])
        assert status(server, "/health") == 200
        for connection in (*working, *silent):
            connection.close()
        wait_for(lambda: status(server, "/v1/models") == 200)
    assert HEALTH_CONNECTIONS < connections.SPARE_DESCRIPTORS


# -- Small requests for large answers ----------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(validation, "MAX_REPEATED_CHARACTERS", 10_000)
    return 10_000


def test_the_total_length_of_echoed_prompts_is_limited(server: EchoServer, small: int) -> None:
    """Eight prompts of 600 kB with `n` of 128 made an answer of 600 MB."""
    for prompt in ("a" * 1000, [65] * 1000, ["a" * 500, "b" * 500], [[65] * 500, [66] * 500]):
        body = {"prompt": prompt, "echo": True, "n": 10, "max_tokens": 1}
        choices = server.http.post("/v1/completions", json=body).json()["choices"]
        assert sum(len(choice["text"]) for choice in choices) == small + len(choices)
        for stream in (False, True):
            error = refused(server, "/v1/completions", json.dumps({**body, "n": 11, "stream": stream}).encode())
            assert error["param"] == "echo"
            assert "would repeat 11000 characters" in error["message"]
            assert f"the limit of one response is {small}" in error["message"]
        assert server.http.post("/v1/completions", json={**body, "n": 11, "echo": False}).status_code == 200


def test_the_total_text_of_logprobs_is_limited(server: EchoServer, small: int) -> None:
    """Tokens of a hundred characters, repeated for each completion."""
    fields = {"input_ids": [65] * 1000, "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    for count, expected in ((10, 200), (11, 400)):
        response = server.http.post("/generate", json={**fields, "sampling_params": {"n": count, "max_new_tokens": 1}})
        assert response.status_code == expected
    assert response.json()["error"]["param"] == "return_text_in_logprobs"


def test_the_text_length_of_token_ids_is_limited(server: EchoServer, small: int) -> None:
    """A million ids of the longest tokens made 80 MB, four times over, and blocked the event loop for a second."""
    for tokens in ([65] * small, [[65] * (small // 2)] * 2):
        answer = server.http.post("/detokenize", json={"tokens": tokens}).json()
        assert "".join(answer["text"]) == "A" * small
        more = [*tokens[:-1], 66, 66] if isinstance(tokens[0], int) else [*tokens, [66]]
        error = refused(server, "/detokenize", json.dumps({"tokens": more}).encode())
        assert (error["param"], error["code"]) == ("tokens", "invalid_value")
        assert f"{small + 1} characters" in error["message"]


def test_ids_outside_the_vocabulary_are_still_refused(server: EchoServer, small: int) -> None:
    body = {"prompt": [2**31, -1, 10**30] * 300, "echo": True, "n": 4}
    assert "token id" in refused(server, "/v1/completions", json.dumps(body).encode())["message"]


@pytest.fixture(scope="module")
def fake_model() -> Iterator[EchoServer]:
    with serve_echo(load_fake_model) as server:
        yield server


@pytest.mark.parametrize("wanted", ["of prompts", "of outputs"])
def test_the_logprobs_of_all_prompts_of_an_answer_are_limited(
    fake_model: EchoServer, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """The limit applied to each prompt separately: a request of a thousand prompts had a thousand times as many."""
    monkeypatch.setattr(fake_model.context._logprobs, "most", 400)
    path, body = "/v1/completions", {"prompt": ["a" * 49] * 2, "logprobs": 3, "max_tokens": 1, "echo": True}
    if wanted == "of outputs":
        body |= {"prompt": "a", "n": 2, "echo": False, "max_tokens": 50, "ignore_eos": True}
    assert fake_model.http.post(path, json=body).status_code == 200
    grown = {**body, "n": 3} if wanted == "of outputs" else {**body, "prompt": ["a" * 49] * 3}
    error = refused(fake_model, path, json.dumps(grown).encode())
    assert error["param"] == "logprobs"
    assert (
        "the request asks for more than 400 logprobs, the limit of one response (--max-logprobs-per-response)"
        in error["message"]
    )
    assert len(fake_model.events(path, grown)) >= 3  # streams are not held
    wait_for(lambda: not fake_model.context.in_flight)


def test_the_logprobs_of_all_answers_are_limited(fake_model: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with few logprobs are served anyway."""
    held = fake_model.context._logprobs
    monkeypatch.setattr(held, "most", 500)
    monkeypatch.setattr(logprobs, "SHORT_ANSWER", 100)
    monkeypatch.setattr(held, "count", 990)
    body = {"prompt": "a" * 49, "logprobs": 3, "max_tokens": 1, "echo": True}
    response = fake_model.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
    assert "the limit is 1000" in response.json()["error"]["message"]
    assert fake_model.http.post("/v1/completions", json={**body, "prompt": "a" * 10}).status_code == 200
    assert held.count == 990  # whatever the outcome of an answer, its share is given back
    monkeypatch.setattr(held, "count", 0)
    assert fake_model.http.post("/v1/completions", json=body).status_code == 200


def test_limits_use_the_longest_token() -> None:
    assert max(len(ByteTokenizer().token_bytes(token)) for token in range(256)) <= ByteTokenizer.longest_token
