"""A sampler in plain numpy, one row at a time: the oracle in tests of the backends' samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.sampling.params import SamplingParams

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReferenceSample:
    """A sampled token (None if a logit was not finite). `margin`: the minimum of three distances, of a cumulative
    probability from `top_p`, of a relative probability from `min_p`, and between the two best scores. Another sampler
    may differ where rounding exceeds it."""

    token: int | None
    margin: float


def adjusted_logits(
    logits: Float32, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: Sequence[int]
) -> Float32:
    """Float32 `[vocab]`: logits after bias, the mask of stop ids, and penalties."""
    adjusted = logits.astype(np.float32).copy()
    for token, bias in sampling.logit_bias.items():
        adjusted[token] += np.float32(bias)
    if len(output) < sampling.min_new_tokens:
        adjusted[list(stop_ids)] = -np.inf
    repetition = np.float32(sampling.repetition_penalty)
    for token in {*prompt, *output}:
        adjusted[token] = adjusted[token] / repetition if adjusted[token] > 0 else adjusted[token] * repetition
    for token in set(output):
        adjusted[token] -= np.float32(sampling.frequency_penalty) * np.float32(output.count(token))
        adjusted[token] -= np.float32(sampling.presence_penalty)
    return adjusted


def kept_tokens(adjusted: Float32, sampling: SamplingParams) -> tuple[Bool, float]:
    """Tokens that top-k, top-p and min-p keep at a temperature above 0, bool `[vocab]`, and the margin of the decision.
    Ties with the least likely token kept are kept."""
    with np.errstate(over="ignore"):
        scaled = (adjusted - adjusted.max()) / np.float32(sampling.temperature)
    kept = np.ones(len(scaled), np.bool_)
    margin = np.inf
    if sampling.top_k != -1 and sampling.top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-sampling.top_k]
    if sampling.top_p < 1.0:
        values, which = np.unique(-scaled[kept], return_inverse=True)
        masses = np.bincount(which, weights=np.exp(-values.astype(np.float64))[which])
        within = np.cumsum(masses) / masses.sum()
        margin = min(margin, float(np.abs(within - sampling.top_p).min()))
        kept &= -scaled <= values[np.argmax(within >= sampling.top_p)]
    if sampling.min_p > 0.0:
        ratios = np.exp(scaled.astype(np.float64))
        margin = min(margin, float(np.abs(ratios[1 - ratios > 1e-9] - sampling.min_p).min(initial=np.inf)))
        kept &= ratios >= sampling.min_p
    return kept, margin


def probabilities(adjusted: Float32, sampling: SamplingParams) -> Float64:
    """The distribution of the sampled token, float64 `[vocab]`, at a temperature above 0."""
    kept, _ = kept_tokens(adjusted, sampling)
    scaled = (adjusted.astype(np.float64) - adjusted.max()) / sampling.temperature
    weights = np.where(kept, np.exp(scaled), 0.0)
    distribution: Float64 = weights / weights.sum()
    return distribution


def reference_sample(
    logits: Float32,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
    noise: Float32,
) -> ReferenceSample:
    """Samples the next token after `prompt` and `output` by the Gumbel-max trick. `logits` and `noise` (standard Gumbel
    variates, one for each token id): both float32 `[vocab]`."""
    if not np.isfinite(logits).all():
        return ReferenceSample(None, np.inf)
    adjusted = adjusted_logits(logits, sampling, prompt, output, stop_ids)
    if sampling.temperature == 0.0:
        return ReferenceSample(int(adjusted.argmax()), np.inf)
    kept, margin = kept_tokens(adjusted, sampling)
    scaled = (adjusted - adjusted.max()) / np.float32(sampling.temperature)
    scores = np.where(kept, scaled + noise, -np.inf)
    second, first = np.sort(scores)[-2:]
    return ReferenceSample(int(scores.argmax()), min(margin, float(first - second)))
