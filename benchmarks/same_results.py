"""Whether a request's results depend on what else runs, and on the number of devices: the embedded model on a CPU,
with each value of `--deterministic`.

    python benchmarks/same_results.py [--json FILE] [--backend torch jax] [--dtype float32 bfloat16] [--prompts 8]

Each prompt is completed with 16 greedy tokens in an empty cache, one prompt after the other: the results that others
are compared with. Then all at once; again, with the prompts cached; in chunks of 16 tokens; all at once with a
retraction every third step; with guessed tokens; and with 3 devices, or processes. A cell has the number of prompts
whose text is the same, and of those whose logprobs are the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import report

from sglang_jax import Engine, SamplingParams

TOKENS = 16
DEVICES = 3
"""A number of devices that the embedded model can be divided into."""

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "in",
    "is",
    "for",
    "that",
    "with",
    "as",
    "on",
    "by",
    "river",
    "light",
    "music",
    "number",
    "energy",
    "people",
    "water",
    "system",
    "model",
]
Result = list[tuple[int, float]]
"""Tokens with their logprobs."""

WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "at once": ({}, True),
    "in chunks of 16": ({"chunked_prefill_size": 16}, False),
    "retracted": ({"test_retract": 3}, True),
    "with guesses": ({"speculative_algorithm": "ngram"}, True),
    "with 3 devices": ({"tp_size": DEVICES}, False),
}
"""Options of the engine, and whether all prompts run at once."""


def prompts(count: int) -> list[str]:
    chosen = random.Random(0)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(5, 150))) for _ in range(count)]


def complete(engine: Engine, texts: Sequence[str], *, at_once: bool) -> list[Result]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
    options: dict[str, Any] = {"return_logprob": True}
    if at_once:
        outputs = engine.generate(list(texts), sampling, **options)
    else:
        outputs = [engine.generate(text, sampling, **options) for text in texts]
    return [[(one.token_id, one.logprob) for one in output.logprobs] for output in outputs]


def cell(found: Sequence[Result], expected: Sequence[Result]) -> str:
    texts = sum([token for token, _ in a] == [token for token, _ in b] for a, b in zip(found, expected, strict=True))
    return f"{texts} / {sum(a == b for a, b in zip(found, expected, strict=True))}"


def compare(common: dict[str, Any], texts: Sequence[str]) -> dict[str, str]:
    with Engine(**common) as engine:
        expected = complete(engine, texts, at_once=False)
        cells = {"cached": cell(complete(engine, texts, at_once=False), expected)}
    for name, (options, at_once) in WAYS.items():
        with Engine(**common, **options) as engine:
            cells[name] = cell(complete(engine, texts, at_once=at_once), expected)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--backend", nargs="+", default=["torch", "jax"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    levels = ["none", "batch", "tp"]
    parser.add_argument("--deterministic", nargs="+", choices=levels, default=levels)
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {os.environ.get('XLA_FLAGS', '')}"
    texts, rows = prompts(arguments.prompts), []
    for backend in arguments.backend:
        for dtype in arguments.dtype:
            for wanted in arguments.deterministic:
                common = {"model_path": "demo", "backend": backend, "device": "cpu", "dtype": dtype}
                common["cpu_activations"] = "exact"
                common |= {"context_length": 1024, "skip_warmup": True, "debug_memory": False}
                common["deterministic"] = wanted
                named = {"backend": backend, "dtype": dtype, "deterministic": wanted}
                rows.append(named | compare(common, texts))
                print(rows[-1], flush=True)
    report(f"Equal texts / equal logprobs of {len(texts)} prompts", rows, arguments.json)


if __name__ == "__main__":
    main()
