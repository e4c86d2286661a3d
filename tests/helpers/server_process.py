"""A server in a separate process, over fake engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from helpers.{module} import {launch}
from sglang_jax.config import ServerConfig
from sglang_jax.server.serve import run
sys.exit(run(ServerConfig(**{options!r}), {launch}))
"""


class Server:
    """A server process. `http` is a client of it once it is ready, `start_seconds` after its start.

    **Arguments:** `launch`: starts its engines, as MODULE.FUNCTION of these helpers.
    """

    def __init__(self, launch: str = "echo_server.launch_echo", **options: Any) -> None:
        paths = [str(ROOT), str(ROOT / "tests")]
        module, _, function = launch.partition(".")
        program = PROGRAM.format(paths=paths, module=module, launch=function, options={"port": 0, **options})
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.http = httpx2.Client(timeout=30)
        self.start_seconds = 0.0
        self._started = time.perf_counter()

    def wait_ready(self) -> str:
        """Its output up to its line that it is ready."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline() + self.process.stdout.readline()
        address = re.search(r"http://[\d.]+:\d+", said)
        assert address is not None, said
        self.http.base_url = httpx2.URL(address[0])
        self.start_seconds = time.perf_counter() - self._started
        return said

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def engine_pids(self) -> list[int]:
        """Processes of engines: the children that lead a process group."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if os.getpgid(int(pid)) == int(pid)]

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)


@contextmanager
def server(launch: str = "echo_server.launch_echo", **options: Any) -> Iterator[Server]:
    running = Server(launch, **options)
    try:
        yield running
    finally:
        running.http.close()
        running.process.kill()
        running.process.communicate()
