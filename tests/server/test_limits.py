"""No request can use enough to slow others down: every limit, the error that names it, and its cost."""

from __future__ import annotations

import gc
import json
import select
import socket
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import CONTEXT_LENGTH, MAX_RUNNING, ByteTokenizer

from sglang_jax.config import ServerConfig
from sglang_jax.engine.batch import FLIGHTS_PER_ROW
from sglang_jax.server import repeats, request_body

JSON = {"Content-Type": "application/json"}
MAX_CHARACTERS = CONTEXT_LENGTH * ByteTokenizer.longest_token


def error_of(server: EchoServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = server.http.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/generate", "text", {"text": "a" * (MAX_CHARACTERS + 1)}),
        ("/v1/completions", "prompt", {"prompt": ["a", "a" * (MAX_CHARACTERS + 1)]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "a" * MAX_CHARACTERS}]}),
        ("/tokenize", "prompt", {"prompt": ["a", "a" * (MAX_CHARACTERS + 1)]}),
    ],
)
def test_a_text_too_long_for_the_context_is_not_tokenized(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str, body: Any
) -> None:
    tokenized: list[int] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    error = error_of(server, path, body)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"characters; the limit is {MAX_CHARACTERS}" in error["message"]
    assert "--context-length" in error["message"]
    assert max(tokenized, default=0) <= 1


def test_a_text_of_the_maximum_length_is_accepted(server: EchoServer) -> None:
    response = server.http.post("/tokenize", json={"prompt": "a" * MAX_CHARACTERS})
    assert response.json()["count"] == MAX_CHARACTERS


def test_token_ids_are_counted_before_they_are_checked(server: EchoServer) -> None:
    error = error_of(server, "/generate", {"input_ids": [-1] * (CONTEXT_LENGTH + 1)})
    assert error["code"] == "context_length_exceeded"


def test_the_total_length_of_stop_strings_is_limited(server: EchoServer) -> None:
    for stop in ("x" * 4097, ["x" * 4000, "y" * 97], "x" * 60_000):
        error = error_of(server, "/v1/completions", {"prompt": "a", "stop": stop})
        assert error["param"] == "stop"
        assert (
            f"at most 4096 characters together (--max-stop-characters), got {sum(map(len, stop))}" in error["message"]
        )
    answer = server.http.post("/v1/completions", json={"prompt": "abc", "stop": ["b" * 4000, "c" * 96]})
    assert answer.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [10**4000]},
        {"prompt": "a", "max_tokens": 10**4000},
        {"prompt": "a", "max_tokens": [10**4000] * 3},
        {"prompt": "a", "seed": 10**4000},
        {"prompt": "a", "stop_token_ids": [10**4000]},
        {"prompt": "a", "logit_bias": {str(10**4000): 1}},
        {"prompt": "a", "temperature": "9" * 4000},
        {"prompt": "a", "x" * 100_000: "y"},
        {"prompt": "a", "logit_bias": {"x" * 100_000: 1}},
        {"prompt": "a", "suffix": {"x" * 100_000: ["y" * 100_000] * 20}},
        {"prompt": "a", "stream_options": {"x" * 100_000: [[[[[["y"]]]]]]}},
        {"prompt": "a", "model": "x" * 100_000},
        {"prompt": "a", "best_of": 10**4000},
    ],
)
def test_an_error_quotes_little_of_the_refused_value(server: EchoServer, body: Any) -> None:
    response = server.http.post("/v1/completions", content=json.dumps(body), headers=JSON)
    assert response.status_code in (400, 404)
    assert len(response.content) < 1200, response.text[:2000]


@pytest.fixture(scope="module")
def small() -> Iterator[EchoServer]:
    """Reads up to 100 kB of a body, and waits half a second for more of it."""
    with serve_echo(max_body_bytes=100_000, client_timeout=0.5) as server:
        yield server


def head(path: str, headers: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n".encode()


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer."""
    connection.settimeout(20)
    received = b""
    while b"}}" not in received:
        more = connection.recv(65536)
        assert more, received
        received += more
    return int(received.split()[1]), json.loads(received.partition(b"\r\n\r\n")[2])


def chunk(size: int) -> bytes:
    return f"{size:x}\r\n".encode() + b"a" * size + b"\r\n"


def test_a_large_body_is_refused_before_it_is_read(small: EchoServer) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 100001\r\nExpect: 100-continue\r\n"))
        status, body = answer(connection)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert "at least 100001 bytes; the limit is 100000 (--max-body-bytes)" in body["error"]["message"]


def test_a_body_without_a_length_is_counted_while_it_is_read(small: EchoServer) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(head("/v1/completions", "Transfer-Encoding: chunked\r\n") + chunk(40_000) * 3)
        status, body = answer(connection)
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert "--max-body-bytes" in body["error"]["message"]


def test_a_body_of_the_maximum_size_is_read(small: EchoServer) -> None:
    body = json.dumps({"prompt": "a", "user": ""})
    body = body.replace('"user": "', '"user": "' + "x" * (100_000 - len(body)))
    assert len(body) == 100_000
    assert small.http.post("/v1/completions", content=body, headers=JSON).status_code == 200


def test_a_missing_body_times_out(small: EchoServer) -> None:
    with socket.create_connection(("127.0.0.1", small.port)) as connection:
        connection.sendall(head("/v1/completions", "Content-Length: 1000\r\n") + b'{"prompt')
        status, body = answer(connection)
    assert (status, body["error"]["code"]) == (408, "client_too_slow")
    assert "0.5 s without data (--client-timeout)" in body["error"]["message"]


def test_the_total_size_of_bodies_is_limited(small: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        request_body, "MIN_BYTES_PER_SECOND", 100
    )  # the server would hold the bytes it read for a quarter of an hour
    connections: list[socket.socket] = []
    refused: list[tuple[int, dict[str, Any]]] = []
    while not refused:
        assert len(connections) < 60, "nobody was refused"
        connections.append(socket.create_connection(("127.0.0.1", small.port)))
        connections[-1].sendall(head("/v1/completions", "Transfer-Encoding: chunked\r\n") + chunk(90_000))
        # On a busy machine a body's bytes may all be late: then 408, and it holds nothing.
        answered = [answer(one) for one in select.select(connections[-1:], [], [], 0.2)[0]]
        refused = [(status, body) for status, body in answered if status != 408]
    assert len(connections) > request_body.BODIES_IN_FLIGHT
    assert refused[0][0] == 503
    assert "(8 times --max-body-bytes)" in refused[0][1]["error"]["message"]
    # Small bodies are always read, and the memory that was held is given back.
    assert small.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    for connection in connections:
        connection.close()
    wait_for(lambda: is_read(small, {"prompt": "a", "user": "x" * 90_000}))


def is_read(server: EchoServer, body: dict[str, Any]) -> bool:
    """False also where the server refuses the body and closes before all of it was sent."""
    try:
        return server.http.post("/v1/completions", json=body).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize(
    "prefix", ['{"prompt": "a", "user": ', "", '{"messages": [{"role": "user", "content": "a", "name": ']
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_the_nesting_of_a_body_is_limited(server: EchoServer, path: str, prefix: str) -> None:
    for depth in (70, 900, 100_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            content = prefix + opening * depth + "1" + closing * depth
            response = server.http.post(path, content=content, headers=JSON)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "body_too_complex"
            assert "levels of nesting; the limit is 64" in response.json()["error"]["message"]


def test_brackets_in_strings_are_not_nesting(server: EchoServer) -> None:
    text = '[{"' * 500 + "\\" * 3 + '"'
    body = {"user": "\\", "prompt": text, "max_tokens": 4, "metadata": [[[["\\", '"[']]]]}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text[:4]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("[" + "{}," * 70_000 + "{}]", "objects and lists; the limit is 32768"),
        ('{"user": {' + ",".join(f'"{i}":0' for i in range(70_000)) + "}}", "fields; the limit is 32768"),
        ("[" + "1," * 1_100_000 + "1]", "values; the limit is 1048576"),
    ],
)
def test_the_number_of_values_in_a_body_is_limited(server: EchoServer, content: str, what: str) -> None:
    error = server.http.post("/v1/completions", content=content, headers=JSON).json()["error"]
    assert error["code"] == "body_too_complex"
    assert what in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] + [1] * 60_000},
        {"prompt": [1] + ["a"] * 60_000},
        {"prompt": [[1]] + [["a"]] * 30_000},
        {"prompt": "a", "stop": [1] * 60_000},
        {"prompt": "a", "stop_token_ids": ["a"] * 60_000},
        {"prompt": "a", "logit_bias": {f"x{number}": "y" for number in range(30_000)}},
    ],
)
def test_invalid_values_cost_no_more_than_valid_ones(server: EchoServer, body: Any) -> None:
    """Each fault used to be an object of over 400 bytes, and only one of them was reported."""
    content = json.dumps(body)
    gc.collect()
    tracemalloc.start()
    response = server.http.post("/v1/completions", content=content, headers=JSON)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 400
    assert most < 40 * len(content), response.text


def test_the_length_of_client_chosen_names_is_limited(server: EchoServer) -> None:
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
        for name in ("rid", "extra_key", "routing_key"):
            error = error_of(server, path, {**body, name: "x" * 1025})
            assert error["param"] == name
            assert "at most 1024 characters" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "body", "count"),
    [
        ("/v1/completions", "prompt", {"prompt": ["a"] * 1025}, 1025),
        ("/v1/completions", "prompt", {"prompt": ["a"] * 65_000, "stream": True}, 65_000),
        ("/v1/completions", "prompt", {"prompt": ["a"] * 9, "n": 128}, 1152),
        ("/generate", "input_ids", {"input_ids": [[1]] * 20_000}, 20_000),
        ("/generate", "text", {"text": ["a"] * 9, "sampling_params": {"n": 128}}, 1152),
    ],
)
def test_the_number_of_completions_of_a_request_is_limited(
    server: EchoServer, path: str, field: str, body: Any, count: int
) -> None:
    error = error_of(server, path, body)
    assert error["param"] == field
    assert f"{count} completions; the limit per request is 1024 (--max-completions-per-request)" in error["message"]


def test_a_batch_of_the_maximum_size_is_answered(server: EchoServer) -> None:
    """It is submitted to the engine in parts, and answered in order."""
    prompts = [[65 + number % 26] * (1 + number % 3) for number in range(1024)]
    answer = server.http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == [bytes(prompt).decode() for prompt in prompts]


def test_another_client_does_not_wait_for_a_whole_batch(slow_server: EchoServer) -> None:
    batch = slow_server.send("/v1/completions", {"prompt": ["abcdefgh"] * 1000, "max_tokens": 8})
    wait_for(lambda: slow_server.running() >= FLIGHTS_PER_ROW * MAX_RUNNING)
    for _ in range(10):
        assert slow_server.running() <= FLIGHTS_PER_ROW * MAX_RUNNING
    assert slow_server.http.post("/generate", json={"text": "b"}).json()["text"] == "b"
    batch.close()
    wait_for(lambda: slow_server.running() == 0 and not slow_server.context.in_flight)


def test_the_queue_of_a_server_is_limited() -> None:
    assert ServerConfig().max_queued_requests == 4096


def test_the_number_of_logprobs_of_an_answer_is_limited(server: EchoServer) -> None:
    body = {"prompt": [65] * 4000, "echo": True, "logprobs": 20, "n": 128, "max_tokens": 0}
    error = error_of(server, "/v1/completions", body)
    assert error["param"] == "logprobs"
    assert "10752000 logprobs of 4000 prompt tokens, for n = 128 completions; the limit is 1048576" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_all_completions_share_the_logprobs_of_their_prompt(server: EchoServer, stream: bool) -> None:
    """They are computed and kept once. An answer repeats them, and long answers are written in a thread."""
    before = len(server.seen())
    fields = {"prompt": [65, 66] * 1000, "echo": True, "logprobs": 2, "n": 3, "max_tokens": 2}
    if stream:
        events = server.events("/v1/completions", fields)
        choices = [choice for event in events for choice in event["choices"] if len(choice["logprobs"]["tokens"]) > 3]
    else:
        choices = server.http.post("/v1/completions", json=fields).json()["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 2]
    for choice in choices:
        assert choice["logprobs"]["tokens"][:2000] == ["A", "B"] * 1000
        assert choice["logprobs"]["token_logprobs"][:2] == [-6.5, -6.6]
    assert [seen["logprob_start"] for seen in server.seen()[before:]] == [0, -1, -1]


def test_cumulative_streams_are_paced(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """1500 tokens with 5 alternatives make 300 MB where each event repeats the ones before it. Short events, those
    of the first tokens, are not delayed."""
    pace = 4 * 2**20
    monkeypatch.setattr(repeats, "REPEATED_BYTES", pace)
    fields = {
        "text": "ab" * 750,
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 5,
        "sampling_params": {"max_new_tokens": 1500},
    }
    begin, total, events, last = time.monotonic(), 0, 0, ""
    with server.http.stream("POST", "/generate", json=fields) as response:
        for line in response.iter_lines():
            total += len(line) if len(line) > repeats.SHORT_EVENT else 0
            if line.startswith("data: {"):
                events, last = events + 1, line
    answer = json.loads(last.removeprefix("data: "))
    assert (answer["text"], len(answer["output_ids"])) == ("ab" * 750, 1500)
    assert len(answer["meta_info"]["output_top_logprobs"]) == 1500
    assert total < pace * (time.monotonic() - begin) + 3 * len(last)
    assert events > 1  # it did stream
