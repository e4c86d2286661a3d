"""Speedup from drafts: the embedded model on a CPU with `--speculative-algorithm` and without, in alternation.

    python benchmarks/speculation.py [--backend jax|torch] [--rows 1 8] [--turns 3] [--drafts 7] [--dtype auto]
                                     [--draft-model PATH] [--json FILE]

Two engines alternate, a text at a time, and their outputs are compared token by token. Kinds of text:

- `edit`: a program to rewrite with a small change; greedy;
- `extract`: records, some of which are to be repeated; greedy;
- `random`: prompts of random tokens, at temperature 1: hardly anything repeats.

`tok/s` are output tokens per second with and without drafts, prefill included, medians over turns; `ratio` is the
median of the turns' ratios. `drafted`, `right`: drafts for each output token, and the accepted share. `equal`:
outputs that were the same; in bfloat16 a sum may round differently with other rows, and two equally likely tokens
change places.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig
from sglang_jax.engine.types import GenerateOutput

OUTPUT = 160
NAMES = ("alpha", "delta", "sigma", "omega", "kappa", "gamma", "theta", "lambda")

Prompt = str | list[int]


def edit(number: int) -> str:
    """A module, and the start of its second version."""
    name = NAMES[number % len(NAMES)]
    module = "\n\n".join(
        f"def {name}_{verb}(values, start={number}):\n    total = start\n    for value in values:\n"
        f"        total = total {sign} value\n    return total"
        for verb, sign in (("add", "+"), ("subtract", "-"), ("multiply", "*"), ("join", "|"))
    )
    return f"# version 1\n{module}\n\n# version 2: the same functions\ndef {name}_add(values, start={number}):\n"


def extract(number: int) -> str:
    """Records, and the start of a copy of them."""
    rows = [
        f"id: {1000 + 7 * index + number}, name: {NAMES[(index + number) % len(NAMES)]}, city: Springfield, state: open"
        for index in range(8)
    ]
    return "Records:\n" + "\n".join(rows) + "\n\nThe same records again:\n" + rows[0] + "\n"


def noise(number: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(number).integers(100, 40_000, 64).tolist()


KINDS: dict[str, tuple[Any, float]] = {"edit": (edit, 0.0), "extract": (extract, 0.0), "random": (noise, 1.0)}


def run(engine: Engine, prompts: list[Prompt], temperature: float) -> tuple[float, list[GenerateOutput]]:
    """Output tokens per second, and the outputs."""
    sampling = SamplingParams(temperature=temperature, seed=1, max_new_tokens=OUTPUT, ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    assert isinstance(outputs, list)
    return sum(len(output.output_ids) for output in outputs) / seconds, outputs


def compare(plain: Engine, guessing: Engine, kind: str, rows: int, turns: int) -> dict[str, Any]:
    """A row of the table."""
    make, temperature = KINDS[kind]
    speeds: list[tuple[float, float]] = []
    drafts = right = tokens = equal = 0
    for turn in range(turns):
        prompts = [make(rows * turn + row) for row in range(rows)]
        found = {}
        for name in ("plain", "guessing") if turn % 2 else ("guessing", "plain"):
            found[name] = run(plain if name == "plain" else guessing, prompts, temperature)
        speeds.append((found["plain"][0], found["guessing"][0]))
        for before, after in zip(found["plain"][1], found["guessing"][1], strict=True):
            assert after.drafts is not None
            equal += before.output_ids == after.output_ids
            drafts, right = drafts + after.drafts.drafts, right + after.drafts.right
            tokens += len(after.output_ids)
    return {
        "kind": kind,
        "rows": rows,
        "tok/s without": statistics.median(speed for speed, _ in speeds),
        "tok/s": statistics.median(speed for _, speed in speeds),
        "ratio": statistics.median(after / before for before, after in speeds),
        "drafted": drafts / tokens,
        "right": right / drafts if drafts else 0.0,
        "equal": f"{equal}/{rows * turns}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["jax", "torch"], default="jax")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=7, help="--speculative-num-draft-tokens")
    parser.add_argument("--draft-model", help="--speculative-draft-model-path; without it, n-grams draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path="demo",
        backend=arguments.backend,
        device="cpu",
        dtype=arguments.dtype,
        context_length=2048,
        max_running_requests=max(32, 2 * max(arguments.rows)),
        disable_radix_cache=True,
    )
    drafting = {
        "speculative_algorithm": "draft" if arguments.draft_model else "ngram",
        "speculative_draft_model_path": arguments.draft_model,
        "speculative_num_draft_tokens": arguments.drafts,
    }
    drafting_config = EngineConfig(**{**config.model_dump(), **drafting})
    with Engine(config) as plain, Engine(drafting_config) as guessing:
        for engine in (plain, guessing):
            run(engine, [noise(10_000)], 0.0)
        table = [
            compare(plain, guessing, kind, rows, arguments.turns) for rows in arguments.rows for kind in arguments.kinds
        ]
    report(f"Guessed tokens, backend {arguments.backend}, {arguments.dtype}", table, arguments.json)


if __name__ == "__main__":
    main()
