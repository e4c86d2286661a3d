"""Output tokens per second of the embedded model on a CPU, next to transformers' `generate` in the same run.

    python benchmarks/decode_cpu.py [--backend auto|jax|torch] [--json FILE] [--batch 1 8 32]
                                    [--reference-python PYTHON | --no-reference] [--peers PYTHON]

Prompts of 64 tokens, 64 output tokens, greedy. "output tok/s" counts the whole of a batch, prefill included;
"decode tok/s" from the first token on. transformers runs in separate processes (`--reference-python` names an
interpreter with torch and transformers, this one by default), in float32 and bfloat16; the better one is quoted. It and
the engine alternate, batch by batch, since machines drift: "ratio" is the median over the turns.
`--peers` names an interpreter with llama.cpp, which is then measured too, on the unmodified GGUF file:
    python -m venv peers && peers/bin/pip install xllamacpp
The memory bound of batch 1 is the bandwidth at which this machine reads a large array, over the bytes of the
weights.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint import resolve_model
from sglang_jax.config import EngineConfig

PROMPT = 64
OUTPUT = 64
REPEATS = 5
TARGETS = {"jax": {1: 40, 8: 180, 32: 450}, "torch": {1: 45, 8: 250, 32: 400}}
"""Output tokens per second of each backend, by batch, on two quiet cores that multiply bfloat16."""


def prompts(batch: int, run: int) -> list[list[int]]:
    """Prompts that share no prefix with those of any other run."""
    random = np.random.default_rng((batch, run))
    return random.integers(100, 40_000, (batch, PROMPT)).tolist()


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second of one batch: over its whole time, and over the time after its first tokens."""

    whole: float
    decode: float


def measure_engine(engine: Engine, batch: int, run: int) -> Rates:
    """Runs one batch on the engine."""
    params = SamplingParams(temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True)
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
    end = time.perf_counter()
    assert tokens == batch * OUTPUT
    assert first is not None
    return Rates(tokens / (end - start), after_first / (end - first))


class Reference:
    """Another engine in a separate process, a script of this folder, which is idle between batches."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name(script)), *arguments]
        self._name = script
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rate(self, batch: int) -> float:
        """Output tokens per second of one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(batch, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._name} ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(
    engine: Engine, references: Sequence[Reference], batch: int, peer: Reference | None = None
) -> dict[str, float]:
    """Medians over `REPEATS` turns, after a turn that does not count."""
    turns, peers = [], []
    for run in range(REPEATS + 1):
        turns.append((measure_engine(engine, batch, run), [reference.rate(batch) for reference in references]))
        if peer is not None:
            peers.append(peer.rate(batch))
    ours = [rates for rates, _ in turns[1:]]
    row: dict[str, float] = {
        "output tok/s": statistics.median(rates.whole for rates in ours),
        "decode tok/s": statistics.median(rates.decode for rates in ours),
    }
    if references:
        by_dtype = zip(*(theirs for _, theirs in turns[1:]), strict=True)
        best = max(by_dtype, key=statistics.median)
        row["transformers tok/s"] = statistics.median(best)
        row["ratio"] = statistics.median(rates.whole / theirs for rates, theirs in zip(ours, best, strict=True))
    if peer is not None:
        row["llama.cpp tok/s"] = statistics.median(peers[1:])
        row["llama.cpp ratio"] = statistics.median(
            rates.whole / theirs for rates, theirs in zip(ours, peers[1:], strict=True)
        )
    return row


def read_bandwidth(backend: str) -> float:
    """Bytes per second at which the machine's cores read an array larger than any cache, by the backend's framework."""
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
    parser.add_argument("--peers", help="interpreter that has xllamacpp: llama.cpp is measured too")
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
    with ExitStack() as stack:
        references: list[Reference] = []
        for dtype in () if arguments.no_reference else ("float32", "bfloat16"):
            references.append(Reference(arguments.reference_python, "decode_transformers.py", "--dtype", dtype))
            stack.callback(references[-1].close)
        peer = None
        if arguments.peers:
            peer = Reference(arguments.peers, "decode_llama_cpp.py", str(resolve_model("demo").path))
            stack.callback(peer.close)
        engine = stack.enter_context(Engine(config=config))
        rows = [{"batch": batch, **measure(engine, references, batch, peer)} for batch in arguments.batch]
        compiles = engine.stats.compiles_after_warm_up
        state = engine.state()
        weight_bytes, backend = int(state["weight_bytes"]), str(state["backend"])
    assert compiles == 0, f"{compiles} programs were compiled after warm-up"
    bound = read_bandwidth(backend) / weight_bytes
    for row in rows:
        batch = int(row["batch"])
        row["target"] = TARGETS[backend].get(batch, "")
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
