"""Host cost of a step's grammar masks: advancing a row's matcher by a token, and writing its mask, in microseconds.

Rows walk through a JSON schema on the embedded model's vocabulary, each by different choices. `--rows 64 --steps
60`.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from sglang_jax.checkpoint import resolve_tokenizer
from sglang_jax.checkpoint.token_table import load_token_table
from sglang_jax.grammar.interface import MatchState
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.grammar.llguidance_trial import Trial
from sglang_jax.runner.plan import allowed_tokens, mask_words
from sglang_jax.sampling.grammar import json_grammar

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def main(rows: int, steps: int) -> None:
    table = load_token_table(resolve_tokenizer("demo"))
    begin = time.perf_counter()
    backend = LlguidanceBackend(table, len(table.tokens), (EOS,))
    print(f"the vocabulary: {time.perf_counter() - begin:.2f} s")
    grammar = json_grammar(SCHEMA)
    begin = time.perf_counter()
    compiled = backend.build(grammar, Trial(backend.specials).try_out(grammar))
    print(f"the schema: {(time.perf_counter() - begin) * 1e3:.1f} ms")
    walk = random.Random(0)
    matchers = [compiled.matcher() for _ in range(rows)]
    words = np.zeros((rows, mask_words(len(table.tokens))), np.int32)
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        backend.fill(matchers, words)
        filled = time.perf_counter() - begin
        tokens = [walk.choice([token for token in allowed_tokens(line) if token != EOS] or [EOS]) for line in words]
        begin = time.perf_counter()
        progress = backend.accept(matchers, [int(token) for token in tokens])
        times.append((filled + time.perf_counter() - begin) / rows * 1e6)
        matchers = [
            matcher if found is MatchState.CONTINUES else compiled.matcher()
            for matcher, found in zip(matchers, progress, strict=True)
        ]
    first, later = times[0], sorted(times[1:])
    print(
        f"a row and step: median {later[len(later) // 2]:.1f} us, 90 % below {later[len(later) * 9 // 10]:.1f} us, "
        f"mean {sum(later) / len(later):.1f} us; the first step {first:.0f} us ({rows} rows, {steps} steps)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
