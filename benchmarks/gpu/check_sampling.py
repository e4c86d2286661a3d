"""Sampled tokens against the plain numpy sampler that all backends are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gpu.bench import Bench, Row, Table
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import reference_sample
from torch_backend.noise import gumbel_noise
from torch_backend.sampler import SamplerInputs

_NEARLY_A_TIE = 1e-4
"""Margin within which rounding may decide."""

_KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-k 50": SamplingParams(temperature=0.7, top_k=50),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "min-p 0.1": SamplingParams(temperature=1.5, min_p=0.1),
    "all of them": SamplingParams(temperature=1.2, top_k=200, top_p=0.8, min_p=0.02),
}


def sampler_inputs(bench: Bench, sampling: list[SamplingParams], vocab: int) -> SamplerInputs:
    """One row each; row i has the seed (i, 7) and samples the token at position 100 + i."""
    rows = len(sampling)

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=bench.device)

    seeds = torch.stack([torch.arange(rows), torch.full((rows,), 7)], dim=1)
    return SamplerInputs(
        temperature=floats([params.temperature for params in sampling]),
        top_k=torch.tensor([vocab if p.top_k == -1 else p.top_k for p in sampling], dtype=torch.int32).to(bench.device),
        top_p=floats([params.top_p for params in sampling]),
        min_p=floats([params.min_p for params in sampling]),
        seed=seeds.to(torch.int32).to(bench.device),
        position=torch.arange(100, 100 + rows, dtype=torch.int32, device=bench.device),
        cut=any(params.top_k != -1 or params.top_p < 1.0 for params in sampling),
    )


def run(bench: Bench) -> Iterator[Table]:
    """One table; rows of all kinds are sampled together."""
    vocab, each = (1000, 1) if bench.small else (128_256, 4)
    sampling = [params for params in _KINDS.values() for _ in range(each)]
    logits = 3 * bench.normal(len(sampling), vocab, dtype=torch.float32)
    found = bench.kernels.sampler.sample(logits, sampler_inputs(bench, sampling, vocab)).tolist()
    greedy = bench.kernels.sampler.greedy(logits).tolist()
    values = logits.cpu().numpy()
    rows = [_row("greedy alone", len(sampling), int(sum(values.argmax(-1) != greedy)), 0)]
    ids = np.arange(vocab, dtype=np.uint32)
    for number, (kind, params) in enumerate(_KINDS.items()):
        wrong = near = 0
        for row in range(number * each, (number + 1) * each):
            noise = gumbel_noise((row, 7), 100 + row, ids)
            expected = reference_sample(values[row], params, prompt=(), output=(), stop_ids=(), noise=noise)
            differs = found[row] != expected.token
            near += int(differs and expected.margin < _NEARLY_A_TIE)
            wrong += int(differs and expected.margin >= _NEARLY_A_TIE)
        rows.append(_row(kind, each, wrong, near))
    yield Table(f"sampling ({bench.kernels.name}) against numpy", rows)


def _row(what: str, rows: int, wrong: int, near: int) -> Row:
    return {"what": what, "rows": rows, "wrong": wrong, "near ties": near, "ok": wrong == 0}
