"""Host time of one whole decode step (plan + finish + publish) in steady state, over a runner that costs nothing.

    python benchmarks/host_step.py [--json FILE]

Targets: at most 60 us at 64 rows and 150 us at 256, the same at 1k and 8k tokens of context within 10 %; with a
second group of layers, which has a window of 1,024 tokens or keeps states, at most 1.5 times that. Every row streams
its tokens, and outputs are encoded as for the wire.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from machine import report

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import PoolSpec, RunnerSpec, StepPlan, StepResult
from sglang_jax.runner.protocol import RunnerReport
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import Inbound, NewRequest, Outbound
from sglang_jax.scheduler.scheduler import Scheduler

STEPS = 1200
TURN = 40
CONTEXTS = (1024, 8192)
WINDOW = 1024


class FreeHandle:
    """Its result is ready at once."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class FreeRunner:
    """Samples token 7 for every row, at no cost."""

    def __init__(self, spec: RunnerSpec) -> None:
        self.spec = spec
        self._handles = [
            FreeHandle(StepResult(np.full((n, 1), 7, np.int32), np.ones(n, np.int32))) for n in range(spec.max_rows + 1)
        ]

    def launch(self, plan: StepPlan) -> FreeHandle:
        return self._handles[len(plan.rows)]

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """Nothing to build."""

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """None: there are no experts."""
        return ()

    def report(self) -> RunnerReport:
        return RunnerReport("free", "none", 0, 0, 0, 0, {})

    def close(self) -> None:
        """Nothing to close."""


class EncodingChannel:
    """Encodes what is published and discards it."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self.sent_bytes = 0

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        return iter(())

    def send(self, message: Outbound) -> None:
        self.sent_bytes += len(self._encoder.encode(message))


def steady(rows: int, context: int, page_size: int, second: CacheKind | None = None) -> Scheduler:
    """A scheduler whose rows all decode, each after a prompt of about `context` tokens; optionally with a second
    group of layers."""
    total = context + STEPS + 2 * rows + 64
    pages = rows * -(-total // page_size) + 1
    pools = [PoolSpec("full", CacheKind.FULL, pages, page_size)]
    if second is CacheKind.WINDOW:
        pools.append(PoolSpec("swa", second, pages, page_size, WINDOW))
    elif second is CacheKind.STATE:
        pools.append(PoolSpec("mamba", second, 3 * rows, page_size))
    spec = RunnerSpec(tuple(pools), rows, max(8192, 2 * rows), total, 1000)
    config = EngineConfig(chunked_prefill_size=8192, page_size=page_size, debug_memory=False)
    scheduler = Scheduler(FreeRunner(spec), (0,), config, EncodingChannel())
    random = np.random.default_rng(0)
    for row in range(rows):
        prompt = random.integers(1, 1000, context - 64, dtype=np.int32)
        prompt[0] = row
        scheduler.add(
            NewRequest(id=row, token_ids=prompt.tobytes(), sampling=SamplingParams(max_new_tokens=None), stream=True)
        )
    while len(scheduler.queue) or scheduler.num_running < rows or scheduler.log.counts.generation_tokens < rows * 30:
        scheduler.step()
    return scheduler


def measure(schedulers: list[Scheduler]) -> list[list[float]]:
    """Microseconds of each of `STEPS` steps of each scheduler. They alternate, so that changes of the machine's
    speed affect all."""
    gc.collect()
    gc.freeze()
    times: list[list[float]] = [[] for _ in schedulers]
    for _ in range(STEPS // TURN):
        for scheduler, found in zip(schedulers, times, strict=True):
            for _ in range(TURN):
                start = time.perf_counter()
                scheduler.step()
                found.append((time.perf_counter() - start) * 1e6)
    gc.unfreeze()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--page-size", type=int, default=16)
    arguments = parser.parse_args()
    table = []
    for rows, target in ((64, 60), (256, 150)):
        cases: list[tuple[int, CacheKind | None]] = [(context, None) for context in CONTEXTS]
        cases += [(context, second) for second in (CacheKind.WINDOW, CacheKind.STATE) for context in CONTEXTS]
        schedulers = [steady(rows, context, arguments.page_size, second) for context, second in cases]
        times = measure(schedulers)
        assert all(scheduler.num_running == rows for scheduler in schedulers)
        of_one = {context: statistics.median(found) for context, found in zip(CONTEXTS, times, strict=False)}
        for (context, second), found in zip(cases, times, strict=True):
            table.append(
                {
                    "rows": rows,
                    "context": context,
                    "second group": second or "",
                    "median us": statistics.median(found),
                    "mean us": statistics.mean(found),
                    "p99 us": statistics.quantiles(found, n=100)[98],
                    "target us": target,
                    "of shortest": statistics.median(found) / of_one[CONTEXTS[0]],
                    "of one group": statistics.median(found) / of_one[context],
                }
            )
    report("Host time of a decode step", table, arguments.json)


if __name__ == "__main__":
    main()
