"""When the device started and ended each step of an engine's runner, without changes to the runner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar
from unittest.mock import patch

import torch

import torch_backend.loading
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.runner.pulse import Building
from torch_backend.streams import CpuThread, CudaStream, Pending

T = TypeVar("T")

Mark = torch.cuda.Event | float
"""A point in the time of the device: an event, or seconds of the host's clock on a CPU."""


@dataclass(slots=True)
class StepLog:
    """Per step: `starts`, when its inputs are on the device; `ends`, after its last kernel and copy; `decodes`, the
    rows of a step of only decode rows, else 0."""

    starts: list[Mark] = field(default_factory=list)
    ends: list[Mark] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets all steps."""
        for part in (self.starts, self.ends, self.decodes):
            part.clear()

    def decode_times(self, rows: int) -> DecodeTimes | None:
        """Times of consecutive steps that decode exactly `rows` rows; None if there are none. All steps must have
        ended."""
        if not len(self.starts) == len(self.ends) == len(self.decodes):
            raise RuntimeError(
                f"{len(self.decodes)} steps were launched, {len(self.starts)} began and {len(self.ends)} ended: "
                "the runner does not submit each step as one piece of work"
            )
        steps = range(len(self.ends))
        pairs = [(a, b) for a, b in pairwise(steps) if self.decodes[a] == rows == self.decodes[b]]
        if not pairs:
            return None
        return DecodeTimes(
            step=statistics.median(_between(self.ends[a], self.ends[b]) for a, b in pairs),
            device=statistics.median(_between(self.starts[b], self.ends[b]) for _, b in pairs),
            gap=statistics.median(_between(self.ends[a], self.starts[b]) for a, b in pairs),
            steps=len(pairs),
        )


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Medians in seconds. `step`: from the end of one step to the end of the next; `device`: from a step's inputs on
    the device to its end; `gap`: from the end of a step to the next one's inputs on the device, when its first
    kernel may start."""

    step: float
    device: float
    gap: float
    steps: int


def _between(earlier: Mark, later: Mark) -> float:
    if isinstance(earlier, float) and isinstance(later, float):
        return later - earlier
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        return float(earlier.elapsed_time(later)) / 1e3
    raise TypeError("marks of different clocks")


class _TimedCudaStream(CudaStream):
    def __init__(self, device: torch.device, log: StepLog) -> None:
        super().__init__(device)
        self._log = log
        self._started = True

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        def timed() -> T:
            self._started = False
            found = work()
            if not self._started:
                self._log.starts.append(self._mark())
            self._log.ends.append(self._mark())
            return found

        return super().submit(timed)

    def to_device(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        moved = super().to_device(host, into)
        if not self._started:
            self._started = True
            self._log.starts.append(self._mark())
        return moved

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event


class _TimedCpuThread(CpuThread):
    def __init__(self, log: StepLog) -> None:
        super().__init__()
        self._log = log

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        def timed() -> T:
            self._log.starts.append(time.perf_counter())
            found = work()
            self._log.ends.append(time.perf_counter())
            return found

        return super().submit(timed)


@contextmanager
def timed_streams(log: StepLog) -> Iterator[None]:
    """Runners loaded in this context record their steps in `log`."""
    with (
        patch.object(torch_backend.loading, "CudaStream", lambda device: _TimedCudaStream(device, log)),
        patch.object(torch_backend.loading, "CpuThread", lambda: _TimedCpuThread(log)),
    ):
        yield


class TimedRunner:
    """A runner loaded under `timed_streams`; records the kind of each step."""

    def __init__(self, runner: Runner, log: StepLog) -> None:
        self._runner = runner
        self._log = log

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def announce_builds(self, building: Building) -> None:
        """See `Runner`."""
        self._runner.announce_builds(building)

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """Leaves no steps in the log."""
        self._runner.warm_up(progress)
        self._log.clear()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Launches as the runner does."""
        self._log.decodes.append(len(plan.rows) if plan.num_decode == len(plan.rows) else 0)
        return self._runner.launch(plan)

    def start_profile(self, folder: str) -> None:
        """See `Runner`."""
        self._runner.start_profile(folder)

    def stop_profile(self) -> None:
        """See `Runner`."""
        self._runner.stop_profile()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """As the wrapped runner."""
        return self._runner.expert_load()

    def report(self) -> RunnerReport:
        return self._runner.report()

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()
