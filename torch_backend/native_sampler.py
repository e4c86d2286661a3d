"""Exact random sampling on a CPU that computes filters and Gumbel noise only for the tokens that can be sampled: a few
hundred of a vocabulary of 50 to 150 thousand. Sorting all tokens, or computing 20 rounds of Threefry for each, would
take longer than the model's step. Instead, each row starts with the tokens near its most likely one, and considers
others only if the result may be among them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_jax.runner.plan import INVALID_TOKEN
from torch_backend.noise import LARGEST_NOISE, gumbel_noise
from torch_backend.sampler import SamplerInputs

Float32 = NDArray[np.float32]

_NEAR = np.float32(8.0)
"""Distance in scaled logits of tokens considered first; others have less than e**-8 of the largest probability."""
_MIN_TEMPERATURE = np.float32(1e-20)


class NativeSampler:
    """`TokenSampler` on a CPU, row by row in numpy, whose plain reductions reach memory bandwidth on one thread."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        rows = logits.numpy()
        tokens = rows.argmax(axis=-1)  # the first NaN, where there is one
        finite = np.isfinite(rows[np.arange(len(rows)), tokens])
        return torch.from_numpy(np.where(finite, tokens, INVALID_TOKEN).astype(np.int32))

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        tokens = self.greedy(logits)
        temperature, seed, position = (
            column.numpy() for column in (parameters.temperature, parameters.seed, parameters.position)
        )
        top_k, top_p, min_p = (column.numpy() for column in (parameters.top_k, parameters.top_p, parameters.min_p))
        for row in np.flatnonzero((temperature > 0) & (tokens.numpy() != INVALID_TOKEN)):
            values = logits[row].numpy()
            distances = (values[tokens[row]] - values) / max(temperature[row], _MIN_TEMPERATURE)
            limit = _kept_distance(distances, int(top_k[row]), top_p[row], min_p[row])
            low, high = seed[row].view(np.uint32)
            tokens[row] = _gumbel_argmax(distances, limit, (int(low), int(high)), int(position[row]))
        return tokens


def _kept_distance(distances: Float32, top_k: int, top_p: np.float32, min_p: np.float32) -> np.float32:
    """The largest distance to the most likely token that all filters keep."""
    kept = np.float32(np.inf)
    if top_k < len(distances) or top_p < 1.0:
        near = distances[distances <= _NEAR]
        near.sort()
        if top_k < len(distances):
            kept = near[top_k - 1] if top_k <= len(near) else np.partition(distances, top_k - 1)[top_k - 1]
        if top_p < 1.0:
            kept = min(kept, _nucleus(distances, near, kept, top_p))
    return min(kept, -np.log(min_p)) if min_p > 0 else kept


def _nucleus(distances: Float32, near: Float32, kept: np.float32, top_p: np.float32) -> np.float32:
    """The smallest distance that contains `top_p` of the probability of the tokens within `kept`; `near` is sorted."""
    if kept > _NEAR:
        inside = distances[distances <= kept]
        mass = np.exp(-inside).sum(dtype=np.float64)
    else:
        inside = near[: np.searchsorted(near, kept, side="right")]
        mass = np.exp(-inside).sum(dtype=np.float64)
    wanted = top_p * mass
    within = np.cumsum(np.exp(-near), dtype=np.float64)
    if within[-1] < wanted:
        near = np.sort(inside)
        within = np.cumsum(np.exp(-near), dtype=np.float64)
    place = int(np.searchsorted(within, wanted, side="left"))
    least: np.float32 = near[min(place, len(near) - 1)]
    return least


def _gumbel_argmax(distances: Float32, limit: np.float32, key: tuple[int, int], position: int) -> int:
    """The token within `limit` with the largest noise minus distance, the first of equals. Noise is bounded: once one
    token has a score, tokens too far away to reach it need no noise."""
    first = _tokens_between(distances, np.float32(-1.0), min(_NEAR, limit))
    scores = gumbel_noise(key, position, first) - distances[first]
    best = scores.argmax()
    reach = min(limit, np.float32(LARGEST_NOISE) - scores[best])
    if reach <= _NEAR:
        return int(first[best])
    later = _tokens_between(distances, _NEAR, reach)
    if not len(later):
        return int(first[best])
    late_scores = gumbel_noise(key, position, later) - distances[later]
    best_late = late_scores.argmax()
    candidates = [(-scores[best], int(first[best])), (-late_scores[best_late], int(later[best_late]))]
    return min(candidates)[1]


def _tokens_between(distances: Float32, above: np.float32, limit: np.float32) -> NDArray[np.uint32]:
    inside = distances <= limit
    if above >= 0:
        inside &= distances > above
    return np.flatnonzero(inside).astype(np.uint32)
