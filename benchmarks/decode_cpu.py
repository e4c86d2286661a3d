"""Output tokens per second of the embedded model on a CPU, next to transformers' `generate` in the same run.

    python benchmarks/decode_cpu.py [--backend auto|jax|torch] [--json FILE] [--batch 1 8 32]
                                    [--reference-python PYTHON | --no-reference]

Prompts of 64 tokens, 64 output tokens, greedy. "output tok/s" counts the whole of a batch, prefill included;
"decode tok/s" from the first token on. transformers runs in a process of its own (`--reference-python` names an
interpreter that has torch and transformers, this one by default), in float32 and bfloat16; the better one is quoted.
The memory bound of batch 1 is the bandwidth at which this machine reads a large array, over the bytes of the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

PROMPT = 64
OUTPUT = 64
REPEATS = 5
TARGETS = {"jax": {1: 40, 8: 180, 32: 450}, "torch": {1: 45, 8: 250, 32: 400}}
"""Output tokens per second of each backend, by batch; of two quiet cores that multiply bfloat16."""


def prompts(batch: int, run: int) -> list[list[int]]:
    """Prompts that share no prefix with any other run's."""
    random = np.random.default_rng((batch, run))
    return random.integers(100, 40_000, (batch, PROMPT)).tolist()


def measure_engine(engine: Engine, batch: int) -> dict[str, float]:
    """Medians over `REPEATS` batches."""
    params = SamplingParams(temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True)
    whole, decode = [], []
    for run in range(REPEATS + 1):
        start = time.perf_counter()
        first: float | None = None
        tokens = after_first = 0
        for output in engine.generate(prompts(batch, run), params, stream=True):
            now = time.perf_counter()
            tokens += len(output.delta_ids)
            if first is not None:
                after_first += len(output.delta_ids)
            elif tokens >= batch:
                first = now
        assert tokens == batch * OUTPUT
        assert first is not None
        if run:
            whole.append(tokens / (time.perf_counter() - start))
            decode.append(after_first / (time.perf_counter() - first))
    return {"output tok/s": statistics.median(whole), "decode tok/s": statistics.median(decode)}


def measure_reference(python: str, batches: list[int]) -> dict[int, float]:
    """The best of transformers' dtypes, output tokens per second for each batch."""
    script = Path(__file__).with_name("decode_transformers.py")
    best = dict.fromkeys(batches, 0.0)
    for dtype in ("float32", "bfloat16"):
        command = [python, str(script), "--dtype", dtype, "--batch", *map(str, batches)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        for batch, rate in json.loads(run.stdout.splitlines()[-1]).items():
            best[int(batch)] = max(best[int(batch)], rate)
    return best


def read_bandwidth(backend: str) -> float:
    """Bytes per second at which the machine's cores read an array that no cache holds, by the backend's framework."""
    matvec, size = _jax_matvec() if backend == "jax" else _torch_matvec()
    matvec()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        matvec()
        times.append(time.perf_counter() - start)
    return size / min(times)


def _jax_matvec() -> tuple[Callable[[], object], int]:
    import jax
    import jax.numpy as jnp

    array, vector = jnp.ones((2**18, 2**10), jnp.float32), jnp.ones(2**18, jnp.float32)
    matvec = jax.jit(lambda a, x: x @ a)
    return lambda: matvec(array, vector).block_until_ready(), array.nbytes


def _torch_matvec() -> tuple[Callable[[], object], int]:
    import torch

    array, vector = torch.ones(2**18, 2**10), torch.ones(2**10)
    return lambda: array @ vector, array.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--backend", choices=["auto", "jax", "torch"], default="auto", help="what runs the model")
    parser.add_argument("--dtype", default="auto", help="dtype of the engine: auto, bfloat16, float32")
    parser.add_argument("--reference-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--no-reference", action="store_true", help="leave transformers out")
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path="demo",
        backend=arguments.backend,
        device="cpu",
        dtype=arguments.dtype,
        context_length=1024,
        debug_memory=False,
    )
    with Engine(config=config) as engine:
        rows = [{"batch": batch, **measure_engine(engine, batch)} for batch in arguments.batch]
        compiles = engine.stats.compiles_after_warm_up
        state = engine.state()
        weight_bytes, backend = int(state["weight_bytes"]), str(state["backend"])
    assert compiles == 0, f"{compiles} programs were compiled after warm-up"
    reference = {} if arguments.no_reference else measure_reference(arguments.reference_python, arguments.batch)
    bound = read_bandwidth(backend) / weight_bytes
    for row in rows:
        batch = int(row["batch"])
        row["target"] = TARGETS[backend].get(batch, "")
        if batch in reference:
            row["transformers tok/s"] = reference[batch]
            row["ratio"] = row["output tok/s"] / reference[batch]
        if batch == 1:
            row["bound tok/s"] = bound
            row["share of bound"] = row["decode tok/s"] / bound
    report(
        f"Decode on the CPU by the {backend} backend, SmolLM2-135M; programs compiled after warm-up: 0",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
