"""A step of the embedded model on JAX on a CPU, with kernels of attention and with XLA's operations, in turns.

    python benchmarks/jax_step_cpu.py [--rows 1 8 32] [--context 128] [--prompts 512 2000] [--steps 20] [--chunk 512]
        [--model demo] [--options '{"cpu_activations": "exact"}'] [--json FILE]

Each is the bare model with logits of the last tokens, as the engine builds it for `--attention-backend numba` and
`xla`. They take turns, step by step, each first in every other turn. Medians of the processor time of all threads,
which other work on the machine changes little, and of the time. A decode row has `--context` keys. A prompt is computed
in chunks of `--chunk` tokens, and its time is that of all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from machine import report
from model_step_cpu import PAGE_SIZE, POOL_TOKENS, make_batch

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import AttentionBackend, EngineConfig
from sglang_jax.jax_runner.building import JaxBackend
from sglang_jax.jax_runner.compiles import use_compilation_cache
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.models import allocate, kv_cache_spec
from sglang_jax.runner.assembly import open_models

FIRST = 3
BACKENDS = (AttentionBackend.XLA, AttentionBackend.NUMBA)


class Stepped:
    """A model with its pages and programs."""

    def __init__(self, attention: AttentionBackend, model: str, options: dict[str, Any]) -> None:
        config = EngineConfig(model_path=model, backend="jax", device="cpu", attention_backend=attention, **options)
        use_compilation_cache(config.cache_address())
        models = open_models(config, open_checkpoint(config.model_path))
        backend = JaxBackend.choose(config, models)
        unloaded = backend.build(models)
        unloaded.load(backend.mesh)
        self.config = unloaded.parallel.config
        self.graph, self.weights = nnx.split(unloaded.model)
        pages = 1 + POOL_TOKENS // PAGE_SIZE
        self.kv = allocate(kv_cache_spec(self.config, backend.kv_dtype, pages, PAGE_SIZE, platform="cpu"), backend.mesh)
        self.programs: dict[tuple[int, ...], Any] = {}

    def run(self, batches: Sequence[ForwardBatch]) -> tuple[float, float]:
        """Processor time and time of steps one after the other, in ms."""
        programs = [self._program(batch) for batch in batches]
        begin, cpu = time.perf_counter(), time.process_time()
        for program, batch in zip(programs, batches, strict=True):
            tokens, self.kv = program(self.weights, self.kv, batch)
            tokens.block_until_ready()
        return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - begin)

    def _program(self, batch: ForwardBatch) -> Any:
        shape = len(batch.tokens), *batch.page_table.shape
        if shape not in self.programs:
            step = jax.jit(self._step, donate_argnums=1)
            self.programs[shape] = step.lower(self.weights, self.kv, batch).compile()
        return self.programs[shape]

    def _step(self, weights: Any, kv: Any, batch: ForwardBatch) -> tuple[jax.Array, Any]:
        model = nnx.merge(self.graph, weights)
        hidden, kv = model(batch, kv)
        return model.logits(hidden[batch.query_starts[1:] - 1]).argmax(-1), kv


def measure(models: dict[str, Stepped], batches: Sequence[ForwardBatch], steps: int) -> dict[str, Any]:
    """Medians of each model, and the shares that kernels take of the time of operations."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(FIRST + steps):
        order = list(models) if number % 2 else list(reversed(models))
        for name in order:
            found[name].append(models[name].run(batches))
    cpu, clock = (
        {name: statistics.median(each[kind] for each in times[FIRST:]) for name, times in found.items()}
        for kind in (0, 1)
    )
    xla, numba = (backend.value for backend in BACKENDS)
    return {
        **{f"{name} CPU ms": round(value, 2) for name, value in cpu.items()},
        "share of CPU": round(cpu[numba] / cpu[xla], 3),
        **{f"{name} ms": round(value, 2) for name, value in clock.items()},
        "share": round(clock[numba] / clock[xla], 3),
    }


def chunks_of(length: int, chunk: int, columns: int) -> list[ForwardBatch]:
    ends = [*range(chunk, length, chunk), length]
    return [make_batch([end], [end - start], 0, columns) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2000])
    parser.add_argument("--steps", type=int, default=20, help="of each model, after the first three")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--options", type=json.loads, default={}, help="further options of the engine, as JSON")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    models = {backend.value: Stepped(backend, arguments.model, arguments.options) for backend in BACKENDS}
    columns = models["xla"].config.max_position // PAGE_SIZE
    rows: list[dict[str, Any]] = []
    for context in arguments.context:
        for count in arguments.rows:
            batch = make_batch([context] * count, [1] * count, count, columns)
            rows.append({"step": f"{count} rows, {context} keys"} | measure(models, [batch], arguments.steps))
    for length in arguments.prompts:
        batches = chunks_of(length, arguments.chunk, columns)
        rows.append({"step": f"prompt of {length}"} | measure(models, batches, max(arguments.steps // 4, 1)))
    report("A step with attention by XLA's operations and by kernels", rows, arguments.json)


if __name__ == "__main__":
    main()
