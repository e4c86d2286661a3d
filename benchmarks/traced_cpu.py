"""Output tokens per second of the embedded model by `--model-impl transformers`, next to this project's native model.

    python benchmarks/traced_cpu.py [--json FILE] [--batch 1 8 32] [--repeats N] [--compile-passes NAMES]

Prompts and outputs are those of `decode_cpu.py`. Both engines are in this process and alternate, batch by batch, each
first in every other turn. "share" is the median over the turns of the traced model's rate over that of the native one;
"share by CPU time" the same of output tokens per second of processor time, which a busy machine changes less (give
OMP_NUM_THREADS=1 there). The target is 0.9.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from decode_engine import OUTPUT, measure_engine
from machine import report

from sglang_jax import Engine

TARGET = 0.9


def measure(engine: Engine, batch: int, run: int) -> tuple[float, float]:
    """Output tokens per second, and per second of this process's processor time."""
    begin = time.process_time()
    rates = measure_engine(engine, batch, run)
    return rates.whole, batch * OUTPUT / (time.process_time() - begin)


def compare(own: Engine, traced: Engine, batch: int, repeats: int) -> dict[str, float]:
    """Medians over turns, after a turn that does not count."""
    turns = []
    for run in range(repeats + 1):
        engines = (own, traced) if run % 2 else (traced, own)
        found = {id(engine): measure(engine, batch, run) for engine in engines}
        turns.append((found[id(own)], found[id(traced)]))
    turns = turns[1:]
    return {
        "batch": batch,
        "own tok/s": statistics.median(ours[0] for ours, _ in turns),
        "traced tok/s": statistics.median(theirs[0] for _, theirs in turns),
        "share": statistics.median(theirs[0] / ours[0] for ours, theirs in turns),
        "share by CPU time": statistics.median(theirs[1] / ours[1] for ours, theirs in turns),
        "target": TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=4, help="turns that count")
    parser.add_argument("--compile-passes", default="all", help="as the engine's option")
    arguments = parser.parse_args()
    common = {"model_path": "demo", "backend": "torch", "device": "cpu", "context_length": 1024, "debug_memory": False}
    common["cpu_activations"] = "exact"  # as the traced model has them
    with (
        Engine(**common) as own,
        Engine(**common, model_impl="transformers", compile_passes=arguments.compile_passes) as traced,
    ):
        rows = [compare(own, traced, batch, arguments.repeats) for batch in arguments.batch]
    report(f"Our own model and the traced one (passes: {arguments.compile_passes}), SmolLM2-135M", rows, arguments.json)


if __name__ == "__main__":
    main()
