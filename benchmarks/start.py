"""Startup times: from the commands to the first answers of `generate`, `chat` and a server, and the end of a server.

    python benchmarks/start.py [--turns 3] [--port 30119] [--cold] [--clone] [--json FILE]

Wall time, and processor time of all processes, with the embedded model; medians. Compiled programs are in the user's
cache, thanks to a first turn that is not counted. `--cold`: the server also with an empty cache. `--clone`: also
`make serve` in a fresh clone of this repository, which installs everything.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machine import report

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "sglang_jax"]
QUESTION = "What is the capital of France?"
GENERATE = [*COMMAND, "generate", "--max-new-tokens", "1", QUESTION]
CHAT = [*COMMAND, "chat", "--max-new-tokens", "1"]
CHAT_ROUTE = "/v1/chat/completions"


@dataclass
class Taken:
    """Seconds by what was measured, one figure per turn; and processor seconds where they were counted."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    used: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float, used: float | None = None) -> None:
        self.wall.setdefault(what, []).append(seconds)
        if used is not None:
            self.used.setdefault(what, []).append(used)

    def rows(self) -> list[dict[str, object]]:
        """A line for each."""
        return [
            {
                "what": what,
                "s": statistics.median(seconds),
                "most s": max(seconds),
                "processor s": statistics.median(self.used[what]) if what in self.used else "",
            }
            for what, seconds in self.wall.items()
        ]


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def first_character(command: list[str]) -> tuple[float, float]:
    """Seconds until the command, which may read a question, prints something, and processor seconds until it has
    ended, as it is then interrupted. Raises `RuntimeError` if it prints nothing."""
    before, start = processor_seconds(), time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if command == CHAT:
            process.stdin.write(f"{QUESTION}\n")
        process.stdin.close()
        said = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    if not said:
        raise RuntimeError(f"{' '.join(command)} said nothing: run it by itself to see why")
    return seconds, processor_seconds() - before


class Served:
    """A server from its command on. Raises `RuntimeError` if it does not become ready."""

    def __init__(self, command: list[str], port: str, folder: Path = ROOT) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        if not any("Ready after" in line for line in self._process.stdout):
            raise RuntimeError(f"{' '.join(command)} did not become ready: run it by itself to see why")
        self.ready = time.perf_counter() - self._begin
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def answer(self) -> float:
        """Sends the question; returns the seconds from the command to the whole answer."""
        self._ask(max_tokens=100)
        return time.perf_counter() - self._begin

    def wait_until_compiled(self) -> None:
        """Returns once all programs are compiled."""
        while True:
            with urllib.request.urlopen(f"{self._url}/readyz", timeout=60) as response:
                if not json.load(response)["programs_left"]:
                    return
            time.sleep(0.5)

    def keep_busy(self) -> None:
        """Returns when a long answer is being written."""
        body: dict[str, object] = {"max_tokens": 4000, "ignore_eos": True, "stream": True}
        stream = urllib.request.urlopen(self._request(body), timeout=60)
        stream.readline()
        threading.Thread(target=_read_to_the_end, args=(stream.read,), daemon=True).start()

    def stop(self) -> float:
        """Seconds from a Ctrl-C, and a second one, which forces the end, to the end of the process."""
        begin = time.perf_counter()
        group = self._process.pid
        os.killpg(group, signal.SIGINT)
        time.sleep(0.1)
        if self._process.poll() is None:
            os.killpg(group, signal.SIGINT)
        self._process.wait(120)
        return time.perf_counter() - begin

    def _ask(self, **fields: object) -> None:
        with urllib.request.urlopen(self._request(fields), timeout=600) as response:
            response.read()

    def _request(self, fields: dict[str, object]) -> urllib.request.Request:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **fields}
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(self._url + CHAT_ROUTE, json.dumps(body).encode(), headers)


def _read_to_the_end(read: Callable[[], bytes]) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server has ended
        read()


def serve_turn(taken: Taken, port: str) -> None:
    """A server with a warm cache that ends idle; then one that ends while an answer is being written."""
    command = [*COMMAND, "serve", "--port", port]
    before = processor_seconds()
    server = Served(command, port)
    answered = server.answer()
    server.wait_until_compiled()
    stopped = server.stop()
    taken.add("server ready", server.ready)
    taken.add("first answer of a server", answered, processor_seconds() - before)
    taken.add("end of an idle server", stopped)
    server = Served(command, port)
    server.keep_busy()
    taken.add("end of a busy server", server.stop())


def cold_turn(taken: Taken, port: str) -> None:
    """A server that compiles everything, and ends while it does."""
    with tempfile.TemporaryDirectory() as cache:
        server = Served([*COMMAND, "serve", "--port", port, "--compilation-cache-dir", cache], port)
        taken.add("server ready, cold cache", server.ready)
        taken.add("first answer of a server, cold cache", server.answer())
        taken.add("end of a server that compiles", server.stop())


def clone_turn(taken: Taken, port: str) -> None:
    """`make serve` in a fresh clone, with a fresh cache of programs."""
    with tempfile.TemporaryDirectory() as folder:
        clone, cache = Path(folder, "clone"), Path(folder, "cache")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        options = f"--port {port} --compilation-cache-dir {cache}"
        server = Served(["make", "serve", f"ARGS={options}"], port, clone)
        taken.add("server ready, fresh clone", server.ready)
        taken.add("first answer of a server, fresh clone", server.answer())
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--port", default="30119", help="of the server")
    parser.add_argument("--cold", action="store_true", help="also start the server with an empty cache of programs")
    parser.add_argument("--clone", action="store_true", help="also run `make serve` in a fresh clone")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    taken, uncounted = Taken(), Taken()
    for number in range(options.turns + 1):
        counted = taken if number else uncounted
        counted.add("first token of generate", *first_character(GENERATE))
        counted.add("first token of chat", *first_character(CHAT))
        serve_turn(counted, options.port)
        if options.cold and number:
            cold_turn(taken, options.port)
        if options.clone and number:
            clone_turn(taken, options.port)
    report("Starting and ending", taken.rows(), options.json)


if __name__ == "__main__":
    main()
