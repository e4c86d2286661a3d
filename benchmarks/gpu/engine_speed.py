"""An 8B model of random weights through the real engine: tokens per second, the batch-1 bound, the host's gap."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
from torch.profiler import ProfilerActivity, profile

from gpu.bench import Bench, Row, Table, judged, share
from gpu.dummy_engine import DummyEngine, dummy_engine
from sglang_jax.cli.bench.commands import run_workload
from sglang_jax.cli.bench.workloads import WorkloadConfig, make_workload
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.sampling.params import SamplingParams

BOUND_TARGET = 1.25
"""Time of a step of one row, over the time in which the weights can be read once."""

GAP_TARGET = 50.0
"""Microseconds of the host between two decode steps."""

_REPEATS = 2


def run(bench: Bench) -> Iterator[Table]:
    """Batches, the seed workload, and where the time of a step goes; decode steps as CUDA graphs."""
    with dummy_engine(bench, graphs=True) as dummy:
        yield from measure_batches(bench, dummy, (1, 4) if bench.small else (1, 32, 256), "with graphs")
        yield _workload(bench, dummy)
        for rows in (1, 4) if bench.small else (1, 32):
            yield _profile(bench, dummy, rows)


def measure_batches(bench: Bench, dummy: DummyEngine, batches: tuple[int, ...], how: str) -> Iterator[Table]:
    length = 8 if bench.small else 128
    model = "a tiny model" if bench.small else "8B"
    throughput: list[Row] = []
    steps: list[Row] = []
    for batch in batches:
        rate, digest = _generate(dummy, batch, length)
        throughput.append({"batch": batch, "output tok/s": rate, "tokens digest": digest})
        steps += _steps(bench, dummy, batch, length)
    compiles = dummy.engine.stats.compiles_after_warm_up
    yield Table(
        f"{model}, {length} tokens in, {length} out, greedy, {how}; built after warm-up: {compiles}", throughput
    )
    yield Table(
        f"decode steps of {model} {how}; targets: 1 row at most {BOUND_TARGET} times the bound, "
        f"gap under {GAP_TARGET:g} us",
        steps,
    )


def _generate(dummy: DummyEngine, batch: int, length: int) -> tuple[float, str]:
    """Output tokens per second (median), prefill included, and a digest of the first run's tokens."""
    params = SamplingParams(temperature=0.0, max_new_tokens=length, ignore_eos=True)
    rates, digest = [], ""
    for run in range(_REPEATS + 1):
        random = np.random.default_rng((batch, run))
        prompts = random.integers(10, dummy.model.vocab_size - 300, (batch, length)).tolist()
        if run == 1:
            dummy.log.clear()
        start = time.perf_counter()
        outputs = dummy.engine.generate(prompts, params)
        seconds = time.perf_counter() - start
        dummy.settle()
        if not run:
            digest = _digest(outputs)
        else:
            rates.append(batch * length / seconds)
    return statistics.median(rates), digest


def _digest(outputs: GenerateOutput | list[GenerateOutput]) -> str:
    every = outputs if isinstance(outputs, list) else [outputs]
    return hashlib.sha256(np.array([output.output_ids for output in every]).tobytes()).hexdigest()[:12]


def _steps(bench: Bench, dummy: DummyEngine, batch: int, length: int) -> Iterator[Row]:
    """Times of the steps since the log was cleared; at half the output each row holds 1.5 times the prompt."""
    times = dummy.log.decode_times(batch)
    if times is None:
        yield {"rows": batch, "note": "no two steps of all rows in a row"}
        return
    moved = dummy.streamed_bytes() + dummy.kv_bytes(batch * length * 3 // 2)
    bound = moved / bench.rates.copy_bytes_per_second
    row: Row = {
        "rows": batch,
        "step us": times.step * 1e6,
        "device us": times.device * 1e6,
        "bound us": bound * 1e6,
        "step / bound": times.step / bound,
        "share of bound": share(bound, times.step),
        "gap us": times.gap * 1e6,
        "gap met": times.gap * 1e6 < GAP_TARGET,
        "steps": times.steps,
    }
    yield judged(row, "step / bound", BOUND_TARGET, at_least=False) if batch == 1 else row


def _workload(bench: Bench, dummy: DummyEngine) -> Table:
    shape = (8, 16, 24) if bench.small else (200, 128, 256)
    prompts, inputs, outputs = shape
    config = WorkloadConfig(
        num_prompts=prompts, random_input_len=inputs, random_output_len=outputs, random_range_ratio=0.5
    )

    def generate(tokens: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[GenerateOutput]:
        outputs = dummy.engine.generate(tokens, sampling)
        return outputs if isinstance(outputs, list) else [outputs]

    totals = run_workload(generate, make_workload(config, dummy.model.vocab_size))
    row: Row = {
        "prompts": totals.requests,
        "seconds": totals.seconds,
        "input tokens": totals.input_tokens,
        "output tokens": totals.output_tokens,
        "output tok/s": totals.output_tokens / totals.seconds,
        "tok/s in all": (totals.input_tokens + totals.output_tokens) / totals.seconds,
    }
    return Table(f"seed workload: {prompts} prompts, random {inputs} in, {outputs} out, range ratio 0.5", [row])


def _profile(bench: Bench, dummy: DummyEngine, batch: int) -> Table:
    """Kernels of a short run, mostly decode steps, by torch's profiler; empty in a dry run, whose operators run in
    another thread."""
    params = SamplingParams(temperature=0.0, max_new_tokens=32, ignore_eos=True)
    prompts = np.random.default_rng(99).integers(10, dummy.model.vocab_size - 300, (batch, 16)).tolist()
    with profile(activities=[ProfilerActivity.CUDA if bench.on_gpu else ProfilerActivity.CPU]) as profiler:
        dummy.engine.generate(prompts, params)
    dummy.settle()
    found = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    whole = sum(event.self_device_time_total for event in found)
    found.sort(key=lambda event: event.self_device_time_total, reverse=True)
    rows = [
        {
            "kernel": event.key[:70],
            "calls": event.count,
            "us each": event.self_device_time_total / event.count,
            "share": share(event.self_device_time_total, whole),
        }
        for event in found[:15]
    ]
    return Table(f"kernels of 32 tokens of {batch} rows, by time", rows)
