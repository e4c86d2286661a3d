"""llama.cpp on a GGUF file as a worker of decode_cpu.py, which runs it with `--peers`.

By default it runs xllamacpp (llama.cpp in a wheel, for CPUs with AVX2), whose server is in this process, without HTTP.
`--server` names a `llama-server` instead, which may be built for this CPU. A server for many short requests has other
limits than one for a single long request, so a new one is started between these.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from decode_protocol import FirstTokens, Run, Times, answer_batches

ROWS, SHORT, LONG = 32, 256, 8192
"""Concurrent short requests; the maximum tokens of each, and of a single long request."""


@dataclass(frozen=True, slots=True)
class Size:
    """Concurrent requests of a server, and the tokens that each may have."""

    rows: int
    tokens: int


class Server(Protocol):
    """A running llama.cpp."""

    def complete(self, body: dict[str, Any], saw: Callable[[], None]) -> int:
        """Runs a request; calls `saw` for each piece of text; returns the number of output tokens."""
        ...

    def close(self) -> None: ...


class Wheel:
    """xllamacpp's server."""

    def __init__(self, path: str, size: Size) -> None:
        import xllamacpp  # here, so that --help works without it

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = size.rows * size.tokens
        params.n_parallel = size.rows
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.warmup = True
        self._server = xllamacpp.Server(params)

    def complete(self, body: dict[str, Any], saw: Callable[[], None]) -> int:
        pieces: list[dict[str, Any]] = []

        def take(piece: dict[str, Any]) -> None:
            saw()
            pieces.append(piece)

        self._server.handle_completions(body, take)
        return int(pieces[-1]["usage"]["completion_tokens"])

    def close(self) -> None:
        del self._server  # stops it


class Binary:
    """A `llama-server` process."""

    def __init__(self, program: str, path: str, size: Size) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        threads = str(len(os.sched_getaffinity(0)))
        command = [program, "-m", path, "--host", "127.0.0.1", "--port", str(self._port), "-t", threads, "-tb", threads]
        command += ["-c", str(size.rows * size.tokens), "-np", str(size.rows)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"{program} ended with status {self._process.returncode}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health").status == 200
        except ConnectionError:
            return False

    def _request(self, method: str, route: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(method, route, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def complete(self, body: dict[str, Any], saw: Callable[[], None]) -> int:
        last = b""
        with self._request("POST", "/v1/completions", json.dumps(body)) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    saw()
                    last = line
        return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Servers:
    """One server at a time, of the size that a batch needs."""

    def __init__(self, start: Callable[[Size], Server]) -> None:
        self._start = start
        self._size = Size(ROWS, SHORT)
        self._server = start(self._size)

    def run(self, prompts: list[list[int]], output: int) -> Times:
        needed = Size(ROWS, SHORT) if max(map(len, prompts)) + output <= SHORT else Size(1, LONG)
        if needed != self._size:
            self.close()
            self._size, self._server = needed, self._start(needed)
        clock = FirstTokens(len(prompts))

        def complete(number: int) -> int:
            body = {"prompt": prompts[number], "n_predict": output, "temperature": 0.0, "ignore_eos": True}
            return self._server.complete(body | {"cache_prompt": False, "stream": True}, lambda: clock.saw(number))

        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(complete, range(len(prompts))))
        times = clock.end()
        assert counts == [output] * len(prompts), counts
        return times

    def close(self) -> None:
        self._server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="GGUF file")
    parser.add_argument("--server", help="llama-server to run")
    arguments = parser.parse_args()

    def start(size: Size) -> Server:
        if arguments.server is not None:
            return Binary(arguments.server, arguments.path, size)
        return Wheel(arguments.path, size)

    with ExitStack() as stack:

        def load() -> Run:
            servers = Servers(start)
            stack.callback(servers.close)
            return servers.run

        answer_batches(load)


if __name__ == "__main__":
    main()
