"""What one hostile client can do to the others: each attack of a review, beside a client that behaves.

    python benchmarks/abuse.py [--seconds 20] [--only NAME ...] [--malformed 10000] [--json FILE]

The server has the tokenizer and the chat template of the demo model, and the real scheduler over a runner that computes
nothing, in a process of its own: what is measured is the front end. For each attack the table has, of a client beside
it that asks for `/health` ten times a second and for a short stream twice a second:

- `health s`: the longest that `/health` took; target: at most 0.25;
- `ttft x`: the median time to the first token, as a multiple of the same without an attack; target: at most 2;
- `peak MiB`, `left MiB`: how far the front end's memory grew during the attack, and what of it was left 3 s after;
  targets: at most 64, and back;
- `held s`: the most processor time for which the front end's event loop did not turn. This is what is left of
  `health s` on a machine with cores to spare; target: at most 0.25;
- `front CPU`: the share of a core that the front end used.

The attacker has a process of its own, at the lowest priority, as it would have a machine of its own. On a machine of
few cores, or one that does other things as well, it slows all processes all the same, and `held s` alone says
something; the table says how many cores there are, and how busy. `--malformed` sends wrong requests (`malformed.py`)
instead, and tells whether any was answered with 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from machine import report
from malformed import MalformedRequest, malformed_requests

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.channel import CoreChannel, Ready
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.engine.types import EngineClient, ModelInfo
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.scheduler.loop import SchedulerLoop

LONGEST_TOKEN = 46_778
"""Of the demo model's vocabulary: a new line and 80 spaces."""

CONTEXT, ROWS, VOCABULARY, PROMPT_TOKENS = 8192, 64, 49_152, 512
JSON = {"Content-Type": "application/json"}
TIMEOUT = 60
BROKEN = (OSError, http.client.HTTPException)
"""What an attacker meets when the server has had enough of it."""


class EmptyRunner(FakeRunner):
    """Samples what follows from a token's place alone. Other fake models read all that a row holds for each token, so
    that a few long outputs would take a core by themselves."""

    def _forward(
        self, row: int, start: int, tokens: list[int], begin: int, choice: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        self._kv_lens[row] = start + len(tokens)
        return [0] * len(tokens), [choice[(7919 * row + 31 * start) % len(choice)]]


class EmptyCore:
    """The scheduler over a runner without a model."""

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        pool = PoolSpec(CacheKind.FULL, ROWS * CONTEXT // 8 // config.page_size + 1, config.page_size)
        spec = RunnerSpec((pool,), ROWS, ROWS + PROMPT_TOKENS, CONTEXT, VOCABULARY, prompt_tokens=PROMPT_TOKENS)
        self._loop = SchedulerLoop(EmptyRunner(spec), (), config, channel)
        info = ModelInfo(
            model_path="demo",
            architecture="none",
            context_length=CONTEXT,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            bos_token_id=None,
            dtype="none",
        )
        self.ready = Ready(
            model_info=info, max_running_requests=ROWS, max_total_tokens=(pool.num_pages - 1) * pool.page_size
        )

    def run(self) -> None:
        self._loop.run()

    def close(self) -> None:
        """Nothing is held."""


def load_empty(config: EngineConfig, channel: CoreChannel) -> EmptyCore:
    return EmptyCore(config, channel)


def serve(port: int) -> int:
    """What the server's process runs."""
    from sglang_jax.server.serve import run

    watching: list[asyncio.Task[None]] = []

    async def launch(config: ServerConfig) -> EngineClient:
        watching.append(asyncio.create_task(_watch_loop(_held_file(port))))
        return await launch_core(config, in_process=False, load=load_empty, load_tokenizer=load_text_tokenizer)

    return run(ServerConfig(port=port), launch)


async def _watch_loop(file: Path) -> None:
    """Writes when the event loop did not turn for more than 20 ms of processor time, and for how long."""
    with file.open("w", buffering=1) as written:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            if now - before > 0.02:
                written.write(f"{time.monotonic()} {now - before}\n")
            before = now


def _held_file(port: int) -> Path:
    return Path(f"/tmp/abuse-{port}.held")


def _held_since(port: int, begin: float) -> float:
    lines = [line.split() for line in _held_file(port).read_text().splitlines()]
    return max((float(held) for at, held in lines if float(at) > begin), default=0.02)


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
    """An attack: this body, over and over, `at_once` times at a time."""

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
    """An attack: so many connections that send `first`, then `then` over and over, and read nothing."""

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
    """An attack: this request without a body, over and over, each on a connection of its own."""

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
    "8,000 headers": _heads(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:\r\n" * 8000 + b"\r\n", 8
    ),
    "heads that trickle": _held(b"GET /health HTTP/1.1\r\n", b"X: y\r\n", 200),
}


@contextmanager
def running_server() -> Iterator[tuple[int, psutil.Process, Path]]:
    """The port, the front end's process, and what it logs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = Path(f"/tmp/abuse-{port}.log")
    with log.open("wb") as errors:
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(port)], stdout=errors, stderr=errors)
        try:
            while b"Ready after" not in log.read_bytes():
                if server.poll() is not None:
                    raise SystemExit(f"the server ended: {log.read_text()}")
                time.sleep(0.1)
            yield port, psutil.Process(server.pid), log
        finally:
            server.terminate()
            server.wait(60)


class Witness:
    """The client that behaves, in threads of its own. Seconds; an answer that does not come counts as `TIMEOUT`."""

    def __init__(self, port: int, server: psutil.Process) -> None:
        self._port = port
        self._server = server
        self._done = threading.Event()
        self.health: list[float] = []
        self.first_tokens: list[float] = []
        self.memory: list[int] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(pause, look))
            for pause, look in ((0.1, self._ask_health), (0.5, self._ask_stream), (0.05, self._look_at_memory))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, pause: float, look: Callable[[], None]) -> None:
        while not self._done.wait(pause):
            look()

    def _ask_health(self) -> None:
        self.health.append(self._timed("GET", "/health", b"", lambda response: response.read()))

    def _ask_stream(self) -> None:
        body = json.dumps({"prompt": "one two three", "max_tokens": 4, "stream": True}).encode()
        self.first_tokens.append(self._timed("POST", "/v1/completions", body, lambda response: response.readline()))

    def _timed(self, method: str, path: str, body: bytes, read: Callable[[http.client.HTTPResponse], bytes]) -> float:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        try:
            connection.request(method, path, body, JSON)
            response = connection.getresponse()
            read(response)
            seconds = time.perf_counter() - begin
            return seconds if response.status == 200 else float(TIMEOUT)
        except BROKEN:
            return float(TIMEOUT)
        finally:
            connection.close()

    def _look_at_memory(self) -> None:
        self.memory.append(self._server.memory_info().rss)


def attack(name: str, port: int, until: float) -> None:
    """What the attacker's process runs."""
    os.nice(19)
    ATTACKS[name](port, until)


def measure(name: str, seconds: float, port: int, server: psutil.Process) -> dict[str, Any]:
    """One attack."""
    before, cpu = server.memory_info().rss, sum(server.cpu_times()[:2])
    begin = time.monotonic()
    attacker = multiprocessing.get_context("fork").Process(
        target=attack, args=(name, port, time.monotonic() + seconds), daemon=True
    )
    attacker.start()
    witness = Witness(port, server)
    time.sleep(seconds)
    witness.stop()
    used = sum(server.cpu_times()[:2]) - cpu
    attacker.join(2)
    attacker.kill()
    time.sleep(3)
    return {
        "attack": name,
        "health s": max(witness.health),
        "held s": _held_since(port, begin),
        "ttft ms": 1000 * statistics.median(witness.first_tokens),
        "worst ttft ms": 1000 * max(witness.first_tokens),
        "peak MiB": (max(witness.memory) - before) / 2**20,
        "left MiB": (server.memory_info().rss - before) / 2**20,
        "front CPU": used / seconds,
    }


def send_malformed(count: int, port: int, server: psutil.Process) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("GET", "/openapi.json")
    description = json.loads(connection.getresponse().read())

    def send(request: MalformedRequest) -> int:
        try:
            if not request.raw:
                one = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
                headers: dict[str, Any] = {name: value.encode("latin-1") for name, value in request.headers.items()}
                one.request(request.method, request.path, request.body, headers)
                response = one.getresponse()
                response.read()
                one.close()
                return response.status
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as raw:
                raw.sendall(request.body)
                raw.shutdown(socket.SHUT_WR)
                received = raw.recv(65536)
                return int(received.split()[1]) if received.startswith(b"HTTP/") else 0
        except BROKEN:
            return 0

    with ThreadPoolExecutor(8) as threads:
        requests = malformed_requests(description, count + 200)
        list(threads.map(send, (next(requests) for _ in range(200))))  # what is made once is made
        before = server.memory_info().rss
        statuses = Counter(threads.map(send, requests))
    time.sleep(3)
    return {
        "requests": count,
        "statuses": " ".join(f"{status}:{number}" for status, number in sorted(statuses.items())),
        "5xx": sum(number for status, number in statuses.items() if status >= 500),
        "left MiB": (server.memory_info().rss - before) / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", help=f"some of: {', '.join(ATTACKS)}")
    parser.add_argument("--malformed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    with running_server() as (port, server, log):
        post(port, "/v1/completions", {"prompt": "one two three", "max_tokens": 4})
        if options.malformed:
            rows = [send_malformed(options.malformed, port, server)]
            title = "Wrong requests"
        else:
            names = options.only or [name for name in ATTACKS if name != "none"]
            rows = [measure(name, options.seconds, port, server) for name in ("none", *names)]
            for row in rows:
                row["ttft x"] = row["ttft ms"] / rows[0]["ttft ms"]
            title = "One client against the others"
        report(title, rows, options.json)
        faults = log.read_bytes().count(b"Traceback")
        print(f"tracebacks in the server's log: {faults}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
