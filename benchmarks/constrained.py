"""How much longer a step takes when its rows follow a grammar: the embedded model on a CPU, with and without, in
alternation.

    python benchmarks/constrained.py [--rows 1 8 64] [--backend jax|torch] [--turns 4] [--json FILE]

Prompts of 64 tokens, 48 output tokens, greedy. Under the grammar each row writes a different long JSON list. Times
are of decode steps, from the first token of the last row on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from machine import report

from sglang_jax import Engine, SamplingParams, json_grammar
from sglang_jax.config import EngineConfig

PROMPT, OUTPUT = 64, 48
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "old": {"type": "boolean"}},
    "required": ["name", "age", "old"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True)
GRAMMAR = json_grammar({"type": "array", "items": ITEM, "minItems": 100})
CONSTRAINED = SamplingParams(temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True, grammar=GRAMMAR)


def step_ms(engine: Engine, rows: int, turn: int, params: SamplingParams) -> float:
    """Milliseconds of a decode step of this many rows."""
    prompts = np.random.default_rng((rows, turn)).integers(100, 40_000, (rows, PROMPT)).tolist()
    begun: set[int] = set()
    start, counted = 0.0, 0
    for output in engine.generate(prompts, params, stream=True):
        if len(begun) == rows:
            counted += len(output.delta_ids)
        else:
            begun.add(output.index)
            start = time.perf_counter()
    return (time.perf_counter() - start) * 1e3 / (counted / rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--backend", choices=["jax", "torch"], default="jax")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path="demo",
        backend=arguments.backend,
        device="cpu",
        context_length=512,
        max_running_requests=max(arguments.rows),
        debug_memory=False,
    )
    found = []
    with Engine(config=config) as engine:
        for rows in arguments.rows:
            turns = [
                [step_ms(engine, rows, 2 * turn + kind, params) for kind, params in enumerate((PLAIN, CONSTRAINED))]
                for turn in range(arguments.turns + 1)
            ][1:]
            plain, constrained = zip(*turns, strict=True)
            found.append(
                {
                    "rows": rows,
                    "plain ms": round(statistics.median(plain), 1),
                    "constrained ms": round(statistics.median(constrained), 1),
                    "ratio": round(statistics.median(b / a for a, b in turns), 3),
                }
            )
        assert engine.stats.compiles_after_warm_up == 0
    report(f"Steps under grammars, SmolLM2-135M, {arguments.backend} backend, by turns", found, arguments.json)


if __name__ == "__main__":
    main()
