"""Output tokens per second of the embedded model by `--model-impl transformers`, next to this project's own model.

    python benchmarks/traced_cpu.py [--json FILE] [--batch 1 8 32] [--compile-passes NAMES]

Prompts and outputs are those of `decode_cpu.py`. Both engines are in this process and take turns, batch by batch;
"share" is the median over the turns of what the traced model reaches of our own. The target is 0.9.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from decode_cpu import measure_engine
from machine import report

from sglang_jax import Engine

REPEATS = 4
TARGET = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--compile-passes", default="all", help="as the engine's option")
    arguments = parser.parse_args()
    common = {"model_path": "demo", "backend": "torch", "device": "cpu", "context_length": 1024, "debug_memory": False}
    with (
        Engine(**common) as own,
        Engine(**common, model_impl="transformers", compile_passes=arguments.compile_passes) as traced,
    ):
        rows = []
        for batch in arguments.batch:
            turns = [
                (measure_engine(own, batch, run), measure_engine(traced, batch, run)) for run in range(REPEATS + 1)
            ]
            ours, theirs = zip(*turns[1:], strict=True)
            share = [second.whole / first.whole for first, second in zip(ours, theirs, strict=True)]
            rows.append(
                {
                    "batch": batch,
                    "own tok/s": statistics.median(each.whole for each in ours),
                    "traced tok/s": statistics.median(each.whole for each in theirs),
                    "share": statistics.median(share),
                    "target": TARGET,
                }
            )
    report(f"Our own model and the traced one (passes: {arguments.compile_passes}), SmolLM2-135M", rows, arguments.json)


if __name__ == "__main__":
    main()
