"""The driver's side of decode_cpu.py: engines in separate processes, one measured at a time, and who used the machine.

Each worker has its own session, in which the kernel counts the processor time of it and its children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import TracebackType

from decode_protocol import Times

TICK = os.sysconf("SC_CLK_TCK")
START_LIMIT, BATCH_LIMIT = 900.0, 600.0
"""Seconds after which a worker that does not answer is killed."""


class WorkerError(Exception):
    """A worker could not start, or ended; the text says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine to measure. `environment` is added to this process's. `bytes_per_value` is the size in which it reads
    weights; None: as the file stores them."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    bytes_per_value: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch of one worker, its processor seconds, and the cores that others used meanwhile: idle workers, and the
    rest of the machine."""

    times: Times
    processor: float
    idle_cores: float
    other_cores: float


class Worker:
    """A running contender. Raises `WorkerError` if it does not start."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        try:
            self._process = subprocess.Popen(
                contender.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **contender.environment},
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(str(error)) from None
        with ExitStack() as on_failure:  # also when this process is notified to end
            on_failure.callback(self.close)
            self._read(START_LIMIT)
            on_failure.pop_all()

    @property
    def session(self) -> int:
        return self._process.pid

    def run(self, prompts: Sequence[list[int] | str], output: int) -> Times:
        """Runs one batch; the worker is idle before and after."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"prompts": prompts, "output": output}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._last_error()) from None
        return Times(**json.loads(self._read(BATCH_LIMIT)))

    def _read(self, limit: float) -> str:
        assert self._process.stdout is not None
        timer = Timer(limit, self._kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise WorkerError(self._last_error())
        return line

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        status = self._process.wait()
        return f"status {status}: {lines[-1] if lines else 'nothing on standard error'}"[:300]

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its children too
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def session_seconds(stats: Collection[str], session: int) -> float:
    """Processor seconds of a session's processes so far, from the contents of their `/proc/PID/stat`."""
    total = 0
    for stat in stats:
        fields = stat.rpartition(")")[2].split()  # from the third field on: the second may contain spaces
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def machine_seconds(stat: str) -> float:
    """Processor seconds that were not idle so far, on all cores, from the contents of `/proc/stat`."""
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, stat.split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / TICK


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds so far, of each worker and of the whole machine."""

    at: float
    sessions: Mapping[int, float]
    machine: float

    @classmethod
    def now(cls, workers: Collection[Worker]) -> Usage:
        stats = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                stats.append(path.read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process ended meanwhile
        sessions = {worker.session: session_seconds(stats, worker.session) for worker in workers}
        return cls(time.perf_counter(), sessions, machine_seconds(Path("/proc/stat").read_text()))

    def since(self, before: Usage, session: int) -> tuple[float, float, float]:
        """Processor seconds of `session` since, the cores that other workers used, and those that the rest used."""
        used = {each: seconds - before.sessions[each] for each, seconds in self.sessions.items()}
        seconds, machine = self.at - before.at, self.machine - before.machine
        workers = sum(used.values())
        return used[session], (workers - used[session]) / seconds, (machine - workers) / seconds


def measure(worker: Worker, workers: Collection[Worker], prompts: Sequence[list[int] | str], output: int) -> Measured:
    """One batch of one worker."""
    before = Usage.now(workers)
    times = worker.run(prompts, output)
    processor, idle, other = Usage.now(workers).since(before, worker.session)
    return Measured(times, processor, idle, max(0.0, other))


def wait_for_quiet(cores: float, at_most: float) -> None:
    """Returns when the machine's processes used less than `cores` during half a second, or after `at_most` seconds."""
    end = time.perf_counter() + at_most
    while time.perf_counter() < end:
        before = machine_seconds(Path("/proc/stat").read_text())
        time.sleep(0.5)
        if (machine_seconds(Path("/proc/stat").read_text()) - before) / 0.5 < cores:
            return
