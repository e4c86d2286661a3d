"""The effect of one hostile client on others: each attack of a review, next to a well-behaved client.

    python benchmarks/abuse.py [--proxy nginx|caddy] [--seconds 20] [--only NAME ...] [--malformed 10000] [--json FILE]

The server has the tokenizer and the chat template of the demo model, and the real scheduler over a runner that computes
nothing, in a separate process: this measures the front end. During each attack one client requests `/health` ten times
a second and a short stream twice a second, and another a chat of 3,000 characters twice a second, which is rendered and
tokenized in turns with others. With `--proxy`, all clients
connect to nginx or Caddy with the recipe of `deploy/proxy/`, without TLS. The table has for each attack:

- `health s`: the longest time of `/health`; target behind a proxy: at most 0.25;
- `ttft x`, `chat x`: the median time to the first token, of the stream and of the chat, as a multiple of the same
  without an attack: without a target, because attacker, proxy and server share the cores of this machine;
- `recovery s`: time after the attack until `/health` is answered within 0.25 s; target: at most 5;
- `peak MiB`, `left MiB`: how far the front end's memory grew during the attack, and how much of that was left 3 s
  after; target of the second: at most 32, which unread streams take once and keep for later ones;
- `held s`: the most processor time for which the front end's event loop did not turn. This equals
  `health s` on a machine with idle cores; target behind a proxy: at most 0.25;
- `front CPU`: the share of a core that the front end used.

The attacker has a separate process at the lowest priority, as if on another machine. On a machine of few cores, or one
with other work, it slows all processes anyway, and only `held s` is meaningful; the table says how many cores there
are, and how busy. Below it are the targets that each attack missed; the exit status is 1 if any did. `--malformed`
sends wrong requests (`malformed.py`) instead, and reports whether any was answered with 5xx, which is status 1 too.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from attacks import ATTACKS, BROKEN, JSON, TIMEOUT, post
from machine import report
from malformed import MalformedRequest, malformed_requests
from proxies import PROXIES, running_proxy

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.channel import CoreChannel, Ready
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.engine.types import EngineClient, ModelInfo
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.scheduler.loop import SchedulerLoop

TARGETS = {"recovery s": 5.0, "left MiB": 32.0}
"""The maximum of each, see above."""

PROXY_TARGETS = {"health s": 0.25, "held s": 0.25, **TARGETS}
"""The maximum of each behind a proxy."""

CHAT = "the quick brown fox " * 150

CONTEXT, ROWS, VOCABULARY, PROMPT_TOKENS = 8192, 64, 49_152, 512


class EmptyRunner(FakeRunner):
    """Samples a token that depends only on its position. Other fake models read everything that a row holds for each
    token, so that a few long outputs would take a core."""

    def _forward(
        self, row: int, start: int, tokens: list[int], begin: int, choice: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        self._kv_lens[row] = start + len(tokens)
        return [0] * len(tokens), [choice[(7919 * row + 31 * start) % len(choice)]]


class EmptyCore:
    """The scheduler over a runner without a model."""

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        pool = PoolSpec("full", CacheKind.FULL, ROWS * CONTEXT // 8 // config.page_size + 1, config.page_size)
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
        """Nothing to close."""


def load_empty(config: EngineConfig, channel: CoreChannel) -> EmptyCore:
    return EmptyCore(config, channel)


def serve(port: int) -> int:
    """Runs in the server's process."""
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


@contextmanager
def running_server() -> Iterator[tuple[int, psutil.Process, Path]]:
    """The port, the front end's process, and its log."""
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
    """The well-behaved client, in threads. Times in seconds; a missing answer counts as `TIMEOUT`."""

    def __init__(self, port: int, server: psutil.Process) -> None:
        self._port = port
        self._server = server
        self._done = threading.Event()
        self.health: list[float] = []
        self.first_tokens: list[float] = []
        self.chats: list[float] = []
        self.memory: list[int] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(pause, look))
            for pause, look in (
                (0.1, self._ask_health),
                (0.5, self._ask_stream),
                (0.5, self._ask_chat),
                (0.05, self._look_at_memory),
            )
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def seconds_to_recover(self) -> float:
        """The seconds until `/health` is answered within 0.25 s."""
        begin = time.perf_counter()
        while self._timed("GET", "/health", b"", lambda response: response.read()) > 0.25:
            if time.perf_counter() - begin > TIMEOUT:
                return float(TIMEOUT)
            time.sleep(0.05)
        return time.perf_counter() - begin

    def _repeat(self, pause: float, look: Callable[[], None]) -> None:
        while not self._done.wait(pause):
            look()

    def _ask_health(self) -> None:
        self.health.append(self._timed("GET", "/health", b"", lambda response: response.read()))

    def _ask_stream(self) -> None:
        body = json.dumps({"prompt": "one two three", "max_tokens": 4, "stream": True}).encode()
        self.first_tokens.append(self._timed("POST", "/v1/completions", body, lambda response: response.readline()))

    def _ask_chat(self) -> None:
        messages = [{"role": "user", "content": CHAT}]
        body = json.dumps({"messages": messages, "max_tokens": 4, "stream": True}).encode()
        self.chats.append(self._timed("POST", "/v1/chat/completions", body, lambda response: response.readline()))

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
    """Runs in the attacker's process."""
    os.nice(19)
    ATTACKS[name](port, until)


def measure(name: str, seconds: float, port: int, server: psutil.Process, server_port: int) -> dict[str, Any]:
    """Measures one attack. `port`: what clients connect to, the server's or a proxy's."""
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
    recovery = witness.seconds_to_recover()
    time.sleep(3)
    return {
        "attack": name,
        "health s": max(witness.health),
        "recovery s": recovery,
        "held s": _held_since(server_port, begin),
        "ttft ms": 1000 * statistics.median(witness.first_tokens),
        "worst ttft ms": 1000 * max(witness.first_tokens),
        "chat ms": 1000 * statistics.median(witness.chats),
        "peak MiB": (max(witness.memory) - before) / 2**20,
        "left MiB": (server.memory_info().rss - before) / 2**20,
        "front CPU": used / seconds,
    }


def missed(row: dict[str, Any], targets: dict[str, float]) -> list[str]:
    """The targets that an attack missed."""
    return [f"{name} {row[name]:.2f}, target {most:g}" for name, most in targets.items() if row[name] > most]


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
        list(threads.map(send, (next(requests) for _ in range(200))))  # one-time allocations are made
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
    parser.add_argument("--proxy", choices=PROXIES, help="a proxy between the clients and the server")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", help=f"some of: {', '.join(ATTACKS)}")
    parser.add_argument("--malformed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    with running_server() as (server_port, server, log), _proxy(options.proxy, server_port) as port:
        post(port, "/v1/completions", {"prompt": "one two three", "max_tokens": 4})
        if options.malformed:
            rows = [send_malformed(options.malformed, port, server)]
            title = "Wrong requests"
        else:
            names = options.only or [name for name in ATTACKS if name != "none"]
            rows = [measure(name, options.seconds, port, server, server_port) for name in ("none", *names)]
            for row in rows:
                row["ttft x"] = row["ttft ms"] / rows[0]["ttft ms"]
                row["chat x"] = row["chat ms"] / rows[0]["chat ms"]
            title = "One client against the others"
        report(title, rows, options.json)
        failures = tell_failures(rows[1:] or rows, TARGETS if options.proxy is None else PROXY_TARGETS)
        faults = log.read_bytes().count(b"Traceback")
        print(f"tracebacks in the server's log: {faults}")
    return 1 if faults or failures else 0


def _proxy(kind: str | None, server_port: int) -> AbstractContextManager[int]:
    return nullcontext(server_port) if kind is None else running_proxy(kind, server_port)


def tell_failures(rows: list[dict[str, Any]], targets: dict[str, float]) -> int:
    """Prints the missed targets of each attack, and returns how many attacks missed any; or how many wrong requests
    got 5xx."""
    if "5xx" in rows[0]:
        return int(rows[0]["5xx"])
    for row in rows:
        print(f"{row['attack']}: {'; '.join(missed(row, targets)) or 'all targets are met'}")
    return sum(bool(missed(row, targets)) for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
