"""Sampling over a large vocabulary, next to sampling by a sort."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gpu.bench import Bench, Table, Work
from gpu.check_sampling import sampler_inputs
from sglang_jax.sampling.params import SamplingParams

_KINDS = {
    "temperature": SamplingParams(temperature=1.0),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}


def run(bench: Bench) -> Iterator[Table]:
    """Sampling for a step's rows; `reads`: the time as a multiple of that of reading the logits once. Compared with
    top-p sampling by a sort in torch."""
    vocab = 500 if bench.small else 128_256
    rows = []
    for count in (2,) if bench.small else (1, 32, 256):
        logits = 3 * bench.normal(count, vocab, dtype=torch.float32)
        once = logits.nbytes / bench.rates.copy_bytes_per_second
        works: dict[str, Work] = {"greedy": partial(bench.kernels.sampler.greedy, logits)}
        for kind, params in _KINDS.items():
            given = sampler_inputs(bench, [params] * count, vocab)
            works[kind] = partial(bench.kernels.sampler.sample, logits, given)
        works["torch, top-p 0.9 by sorting"] = partial(_by_sorting, logits)
        for kind, work in works.items():
            seconds = bench.stopwatch.seconds(work)
            rows.append({"rows": count, "sample": kind, "us": seconds * 1e6, "reads": seconds / once})
    yield Table(f"sampling ({bench.kernels.name}) over {vocab} tokens", rows)


def _by_sorting(logits: torch.Tensor) -> torch.Tensor:
    ordered, tokens = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    ordered[ordered.cumsum(dim=-1) - ordered > 0.9] = 0.0
    return tokens.gather(1, torch.multinomial(ordered, 1))
