"""Cost of sampling in a step of the JAX backend on a CPU, by the sampling parameters.

    python benchmarks/sampler_cpu.py [--rows 1 8 32] [--vocab-size 49152] [--spread 6] [--repeat 25] [--json FILE]

Logits are normal with a standard deviation of `--spread`: with 6 about 50 tokens hold 0.9 of the probability at
temperature 0.8, with 2 about 5,000. Alternates with a search of the whole vocabulary, as done where the kept tokens
are not among the nearest. Milliseconds, the median; processor time of all threads, and wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from machine import report

from sglang_jax.jax_runner import sampler
from sglang_jax.jax_runner.sampling_state import SamplingState

ASKED = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "all three": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
}


def timed(run: Callable[[], jax.Array]) -> tuple[float, float]:
    """Seconds of processor time and of wall time."""
    clock, processor = time.perf_counter(), time.process_time()
    run().block_until_ready()
    return time.process_time() - processor, time.perf_counter() - clock


def compiled(rows: int, vocab_size: int, near: bool) -> Callable[..., jax.Array]:
    lines = jax.ShapeDtypeStruct((rows,), jnp.int32)
    shapes = jax.eval_shape(lambda: SamplingState.empty(rows, vocab_size))
    with patch.object(sampler, "has_near", lambda _: near):
        lowered = jax.jit(lambda *arguments: sampler.sample(*arguments)).lower(
            jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32),
            shapes,
            lines,
            lines,
            jax.ShapeDtypeStruct((rows,), jnp.bool_),
        )
    return lowered.compile()


def measure(rows: int, vocab_size: int, spread: float, repeat: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, spread, (rows, vocab_size)), jnp.float32)
    places, lengths, active = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, 7, jnp.int32), jnp.ones(rows, jnp.bool_)
    programs = {near: compiled(rows, vocab_size, near) for near in (True, False)}
    plain = SamplingState.empty(rows, vocab_size)
    table = []
    for name, fields in ASKED.items():
        given = {field: jnp.full_like(getattr(plain, field), value) for field, value in fields.items()}
        state = replace(plain, **given)
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(repeat):
            for near, program in programs.items():
                times[near].append(timed(lambda run=program, own=state: run(logits, own, places, lengths, active)))
        columns = {
            f"{what}{unit}": round(median(column) * 1e3, 2)
            for near, what in ((True, ""), (False, "whole, "))
            for unit, column in zip(("processor ms", "ms"), zip(*times[near], strict=True), strict=True)
        }
        table.append({"rows": rows, "asked": name, **columns})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--spread", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    measured = [
        row for rows in options.rows for row in measure(rows, options.vocab_size, options.spread, options.repeat)
    ]
    report("Sampling", measured, options.json)


if __name__ == "__main__":
    main()
