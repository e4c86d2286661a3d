"""Latencies while long prompts arrive: simulated time, the real scheduler.

    python benchmarks/fair_prefill.py [--json FILE]

32 requests decode; prompts of 64k tokens arrive one after the other, and prompts of 100 tokens continuously. The runner
computes nothing: a clock advances by the cost of a step, which is a constant plus a part for each decode row, each
token of a prompt (padded to a power of two) and each key that is read, with noise of 3 %. The scheduler does not know
these costs.

- ITL: milliseconds between two tokens of a decoding request. TTFT: of the short prompts, in milliseconds and in steps.
- "plain fcfs": prompts one after the other in order of arrival, each with all tokens of a chunk.

Targets: with `target_itl_ms`, p99 ITL at most 1.2 times it, and a short prompt's first token within 3 steps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from host_step import EncodingChannel
from machine import report

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import PoolSpec, RunnerSpec, StepPlan, StepResult, one_each
from sglang_jax.runner.protocol import RunnerReport
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import admission
from sglang_jax.scheduler.messages import NewRequest, Outbound, StepOutputs
from sglang_jax.scheduler.scheduler import Scheduler

DECODING = 32
LONG = 65_536
SHORT = 100
CONTEXT = 70_000
SHAPES = tuple((2**power, 256) for power in range(4, 14))


@dataclass
class Device:
    """A clock, and the time when the device finishes its work. Seconds."""

    now: float = 0.0
    done: float = 0.0
    noise: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def cost(self, plan: StepPlan) -> float:
        """The cost of a step, about that of an 8B model on one accelerator."""
        lengths, ends = plan.query_lens[plan.num_decode :], plan.kv_lens[plan.num_decode :].astype(np.int64)
        tokens = plan.num_tokens if len(lengths) else 0
        padded = next(size for size, _ in SHAPES if tokens <= size) if tokens else 0
        reads = float((lengths * (2 * ends - lengths)).sum()) / 2
        context = float(plan.kv_lens[: plan.num_decode].sum())
        seconds = 8e-3 + 2e-5 * plan.num_decode + 2.5e-5 * padded + 8e-9 * context + 0.8e-9 * reads
        return seconds * float(self.noise.normal(1.0, 0.03))


class TimedHandle:
    """Its result is ready when the clock says so."""

    def __init__(self, device: Device, done: float, result: StepResult) -> None:
        self._device, self._done, self._result = device, done, result

    def result(self) -> StepResult:
        self._device.now = max(self._device.now, self._done)
        return self._result


class TimedRunner:
    """Samples token 7 for every row, after a simulated time."""

    def __init__(self, spec: RunnerSpec, device: Device) -> None:
        self.spec = spec
        self._device = device

    def launch(self, plan: StepPlan) -> TimedHandle:
        device = self._device
        device.done = max(device.done, device.now) + device.cost(plan)
        return TimedHandle(
            device, device.done, StepResult(*one_each(np.full(len(plan.rows), 7, np.int32), plan.samples))
        )

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """None: there are no experts."""
        return ()

    def report(self) -> RunnerReport:
        return RunnerReport("timed", "none", 0, 0, 0, 0, {})


class ClockedChannel(EncodingChannel):
    """Records when and in which step each request's tokens arrived."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.steps = 0
        self.times: dict[int, list[float]] = {}
        self.first_step: dict[int, int] = {}

    def send(self, message: Outbound) -> None:
        if not isinstance(message, StepOutputs):
            return
        for request in np.frombuffer(message.ids, np.int64).tolist():
            self.times.setdefault(request, []).append(self._device.now)
            self.first_step.setdefault(request, self.steps)


def run(chunk: int, target_ms: float | None, seconds: float, *, plain: bool) -> dict[str, object]:
    """Runs a few minutes of simulated time."""
    device = Device()
    pages = (8 * CONTEXT + DECODING * 8192 + 200_000) // 16
    spec = RunnerSpec((PoolSpec("full", CacheKind.FULL, pages, 16),), 256, 8192, CONTEXT, 1000, SHAPES)
    config = EngineConfig(chunked_prefill_size=chunk, target_itl_ms=target_ms, debug_memory=False)
    channel = ClockedChannel(device)
    scheduler = Scheduler(TimedRunner(spec, device), (0,), config, channel, clock=lambda: device.now)
    if plain:
        scheduler._planner._sharing[0].share = _in_order_of_arrival
    random = np.random.default_rng(0)
    asked: dict[int, tuple[float, int]] = {}

    def add(request: int, length: int, new_tokens: int) -> None:
        prompt = random.integers(2, 1000, length, dtype=np.int32)
        asked[request] = (device.now, channel.steps)
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=1)
        scheduler.add(NewRequest(id=request, token_ids=prompt.tobytes(), sampling=sampling, stream=True))

    for request in range(DECODING):
        add(request, 1000, 60_000)
    next_id, next_long, next_short = 1000, 5.0, 2.0
    long_ids: list[int] = []
    while device.now < seconds:
        if device.now >= next_long:
            add(next_id, LONG, 16)
            long_ids.append(next_id)
            next_id, next_long = next_id + 1, device.now + 12.0
        if device.now >= next_short:
            add(next_id, SHORT, 16)
            next_id, next_short = next_id + 1, device.now + float(random.exponential(0.25))
        channel.steps += 1
        scheduler.step()
    gaps = np.concatenate([np.diff([t for t in channel.times[k] if t > 5.0]) for k in range(DECODING)]) * 1e3
    short = [k for k in asked if k >= 1000 and k not in long_ids and k in channel.times]
    waits = np.array([channel.times[k][0] - asked[k][0] for k in short]) * 1e3
    steps = np.array([channel.first_step[k] - asked[k][1] for k in short])
    ends = [channel.times[k][0] - asked[k][0] for k in long_ids if k in channel.times]
    return {
        "chunk": chunk,
        "target ms": target_ms or "",
        "order": "plain fcfs" if plain else "shared",
        "ITL p50": float(np.median(gaps)),
        "ITL p99": float(np.quantile(gaps, 0.99)),
        "short TTFT p50": float(np.median(waits)),
        "short TTFT p99": float(np.quantile(waits, 0.99)),
        "steps p99": float(np.quantile(steps, 0.99)),
        "steps max": int(steps.max()),
        "short unanswered": sum(k >= 1000 and k not in long_ids and k not in channel.times for k in asked),
        "long TTFT s": float(np.mean(ends)) if ends else "",
        "long done": f"{len(ends)}/{len(long_ids)}",
    }


def _in_order_of_arrival(
    prompts: list[object], work: list[int], allowance: int, most: list[int], *, by_priority: bool
) -> list[int]:
    parts = []
    for left in most:
        parts.append(min(left, allowance))
        allowance -= parts[-1]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--seconds", type=float, default=120.0, help="of simulated time")
    arguments = parser.parse_args()
    table = []
    for chunk, target, plain in (
        (512, None, True),
        (2048, None, True),
        (512, None, False),
        (2048, None, False),
        (8192, 30.0, False),
        (8192, 50.0, False),
        (8192, 100.0, False),
    ):
        looks = admission.LEAST_WORK_LOOKS
        admission.LEAST_WORK_LOOKS = 0 if plain else looks
        table.append(run(chunk, target, arguments.seconds, plain=plain))
        admission.LEAST_WORK_LOOKS = looks
    report("Prompts of 64k tokens beside short ones and decoding rows, simulated time, ms", table, arguments.json)


if __name__ == "__main__":
    main()
