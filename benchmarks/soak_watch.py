"""The server of `soak_server.py` from outside: its processes, their memory, and the faults injected."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

ADMIN_KEY = "the-key-of-the-soak"
NOTICE_SECONDS = 120.0
"""How long a fault may take to be noticed."""

SETTLED_SECONDS = 30.0
"""How long a core serves before the next fault."""


def ask(port: int, path: str, method: str = "GET") -> Any:
    """The answer of an operator's route."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {content[:300]!r}")
        return json.loads(content)
    finally:
        connection.close()


@dataclass
class Fault:
    """A fault of a core: from `at` until `noticed` it explains errors; `back`: it serves again."""

    what: str
    at: float
    noticed: float | None = None
    back: float | None = None

    def explains(self, begin: float, end: float, grace: float = 5.0) -> bool:
        """Whether a request of this time may have been lost by it."""
        over = self.at + NOTICE_SECONDS if self.noticed is None else self.noticed
        return begin <= over + grace and end >= self.at

    def keeps_out(self, begin: float, end: float, grace: float = 5.0) -> bool:
        """Whether a session of the replica could not be opened at this time."""
        return end >= self.at and (self.back is None or begin <= self.back + grace)


class Saboteur:
    """Kills the core of one replica every `kill_every` seconds, and stops it every `stop_every`, as soon as it
    serves again. The other core is spared, so that one of them is as old as the server."""

    def __init__(self, port: int, spared: int, server: psutil.Process, kill_every: float, stop_every: float) -> None:
        self._port = port
        self._spared = spared
        self._server = server
        self._begin = time.monotonic()
        self._due = [(kill_every, signal.SIGKILL, kill_every), (stop_every, signal.SIGSTOP, stop_every)]
        self._serves_since = self._begin
        self._over = threading.Event()
        self.faults: list[Fault] = []
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops; waits until the last victim serves again."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(0.2):
                now = time.monotonic()
                self._due.sort(key=lambda due: due[0])
                due, number, every = self._due[0]
                if now - self._begin >= due and now - self._serves_since >= SETTLED_SECONDS:
                    self._due[0] = (due + every, number, every)
                    self._sabotage(number)
        except (RuntimeError, OSError) as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def _sabotage(self, number: signal.Signals) -> None:
        victims = [pid for pid in cores(self._server) if pid != self._spared]
        before = self._load()["restarts"]
        fault = Fault(number.name, time.monotonic())
        self.faults.append(fault)
        os.kill(victims[0], number)
        while fault.back is None:
            time.sleep(0.1)
            load, now = self._load(), time.monotonic()
            if fault.noticed is None and (load["state"] != "serving" or load["restarts"] > before):
                fault.noticed = now
            if load["restarts"] > before and load["state"] == "serving":
                fault.back = self._serves_since = now
            if now - fault.at > 10 * NOTICE_SECONDS:
                raise RuntimeError(f"{fault.what}: the core does not come back: {load}")

    def _load(self) -> dict[str, Any]:
        """The load of the replica whose core is not spared: the first one."""
        loads: list[dict[str, Any]] = ask(self._port, "/v1/loads")["loads"]
        return loads[0]


def cores(server: psutil.Process) -> list[int]:
    """The processes of engine cores: they lead process groups."""
    return sorted(child.pid for child in server.children() if os.getpgid(child.pid) == child.pid)


@dataclass
class Samples:
    """A process's memory in MiB, by the time of sampling."""

    name: str
    born: float
    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def minutes(self, since: float, length: float = 60.0, until: float = math.inf) -> list[float]:
        """The median of each whole minute."""
        found: dict[int, list[float]] = {}
        for when, size in zip(self.times, self.memory, strict=True):
            if since <= when <= until:
                found.setdefault(int((when - since) // length), []).append(size)
        return [statistics.median(sizes) for _, sizes in sorted(found.items()) if len(sizes) > length / 4]


class Scales:
    """Measures every process of the server once a second."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._over = threading.Event()
        self.processes: dict[int, Samples] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops measuring."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            for process in [self._server, *self._server.children(recursive=True)]:
                try:
                    self._weigh(process)
                except psutil.NoSuchProcess:
                    continue

    def _weigh(self, process: psutil.Process) -> None:
        now = time.monotonic()
        samples = self.processes.get(process.pid)
        if samples is None:
            samples = self.processes[process.pid] = Samples(_kind(process, self._server), now)
        memory = process.memory_info().rss / 2**20
        samples.times.append(now)
        samples.memory.append(memory)


def _kind(process: psutil.Process, server: psutil.Process) -> str:
    if process.pid == server.pid:
        return "front end"
    command = " ".join(process.cmdline())
    for part, name in (("resource_tracker", "resource tracker"), ("spawn_main", "core")):
        if part in command:
            return name
    return command.rpartition("/")[2][:40] or process.name()
