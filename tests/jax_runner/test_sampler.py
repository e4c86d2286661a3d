"""The JAX sampler's noise, and its properties beyond the contract that `tests/runner/test_samplers.py` tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.samplers import SAMPLERS, Case, token_of
from jax.extend.random import threefry_2x32 as jax_threefry_2x32
from scipy import stats

from sglang_jax.jax_runner.filters import Filters, Near, largest_kept
from sglang_jax.jax_runner.sampler import first_argmax, gumbel_noise, threefry_2x32
from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.sampling.params import SamplingParams

_noise = jax.jit(gumbel_noise)


def test_noise_bits_are_threefry() -> None:
    key, counter = np.array([1234567, 987654321], np.uint32), np.arange(64, dtype=np.uint32)
    expected = np.asarray(jax_threefry_2x32(key, counter))
    words = threefry_2x32((jnp.uint32(key[0]), jnp.uint32(key[1])), (counter[:32], counter[32:]))
    assert np.concatenate([np.asarray(word) for word in words]).tolist() == expected.tolist()


def test_noise_is_gumbel_and_differs_by_seed_word_and_position() -> None:
    seeds = np.array([[5, 0], [5, 0], [6, 0], [5, 1]], np.uint32)
    noise = np.asarray(_noise(seeds, np.array([9, 10, 9, 9], np.int32), np.arange(20_000)[None]))
    assert np.isfinite(noise).all()
    for row in noise:
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-4
    correlations = np.corrcoef(noise) - np.eye(4)
    assert np.abs(correlations).max() < 0.03


def test_a_logit_of_minus_infinity_is_an_error_of_its_row() -> None:
    logits = np.zeros(37, np.float32)
    logits[3] = -np.inf
    assert SAMPLERS["jax"].sample([Case(logits, SamplingParams())]) == [INVALID_TOKEN]


@pytest.mark.parametrize("vocab_size", [37, 80, 7 * 256, 49_152])  # without blocks, and with blocks of 16 and 256
def test_first_argmax_takes_the_first_of_equals(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    values = np.stack(
        [
            rng.integers(0, 4, vocab_size),
            rng.integers(0, vocab_size, vocab_size),
            rng.standard_normal(vocab_size),
            np.full(vocab_size, -np.inf),
            np.where(np.arange(vocab_size) % 19 == 18, np.inf, 0.0),
        ]
    ).astype(np.float32)
    assert first_argmax(values).tolist() == values.argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab_size", [37, 7 * 256])
@pytest.mark.parametrize("place", [0, 20, -1])
def test_first_argmax_of_a_row_with_a_nan_is_not_a_token(vocab_size: int, place: int) -> None:
    values = np.arange(vocab_size, dtype=np.float32)[None]
    values[0, place] = np.nan
    assert first_argmax(values)[0] >= vocab_size


LARGE = 32_773
"""A size that no block divides."""


def large_case(rng: np.random.Generator, spread: float, grain: float) -> Case:
    """Logits of which few or many are close to the largest, with many ties where the grain is coarse."""
    logits = np.round(rng.normal(0, spread, LARGE) / grain).astype(np.float32) * np.float32(grain)
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.3], p=[0.1, 0.5, 0.4])),
        top_k=int(rng.choice([-1, 1, 40, 5000])),
        top_p=float(rng.choice([1.0, 0.9, 0.2])),
        min_p=float(rng.choice([0.0, 0.05])),
    )
    return Case(logits, sampling, seed=int(rng.integers(2**63)))


def test_nearest_tokens_give_the_same_as_the_whole_of_a_large_vocabulary() -> None:
    """It makes no difference whether a line's filters end among its nearest tokens, and which options other
    lines have."""
    rng = np.random.default_rng(3)
    shapes = [(4.0, 1e-6), (4.0, 0.5), (0.3, 1e-6), (0.8, 2.0)]
    cases = [large_case(rng, *shapes[number % len(shapes)]) for number in range(24)]
    references = [case.reference() for case in cases]
    sure = [reference.margin > 1e-5 for reference in references]
    assert sum(sure) >= 18
    together = [token for start in range(0, 24, 6) for token in SAMPLERS["jax"].sample(cases[start : start + 6])]
    mixed = [token for start in range(4) for token in SAMPLERS["jax"].sample(cases[start::4])]
    for place, reference in enumerate(references):
        token = mixed[place % 4 * 6 + place // 4]
        assert token == together[place]
        assert token == token_of(reference) or not sure[place]


def test_filters_over_the_nearest_tokens_equal_those_over_all() -> None:
    rng = np.random.default_rng(4)
    values = np.concatenate([np.abs(rng.normal(0, 8, (5, LARGE))), rng.integers(0, 9, (2, LARGE))]).astype(np.float32)
    values[6, 200:] = np.inf  # under a mask: fewer than the number of nearest tokens
    values -= values.min(axis=1, keepdims=True)
    near = jax.jit(Near.of)(values)
    kept_of = jax.jit(largest_kept)
    for line, (bound, tokens) in enumerate(zip(near.bound, near.tokens, strict=True)):
        assert np.isin(np.flatnonzero(values[line] < bound), tokens).all()
        inside = tokens[tokens < LARGE]
        assert (near.distances[line][tokens < LARGE] == values[line][inside]).all()
    assert near.has_all(near.bound).tolist() == (near.bound == np.inf).tolist() == [False] * 6 + [True]
    for top_k in (1, 40, 300, 3000, 5000, LARGE):
        for top_p, min_p in [(1.0, 0.0), (0.9, 0.0), (0.3, 0.01), (1.0, 0.2), (0.999, 0.5)]:
            values_of = ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32))
            filters = Filters(*[np.full(7, value, kind) for value, kind in values_of], np.arange(7) != 2)
            for where in (near, None):
                for line, kept in enumerate(np.asarray(kept_of(values, where, filters))):
                    if filters.random[line]:
                        check_kept(values[line], kept, top_k, top_p, min_p)


def check_kept(distances: np.ndarray, kept: float, top_k: int, top_p: float, min_p: float) -> None:
    """By sorting, in float64. Between two tokens whose mass is within rounding of the limit either is correct."""
    ranked = np.sort(distances)
    ranked = ranked[ranked <= ranked[min(top_k, len(ranked)) - 1]]
    mass = np.exp(-ranked.astype(np.float64)).cumsum()
    mass /= mass[-1]
    bound = -np.log(np.float32(min_p)) if min_p else np.inf
    low, high = (ranked[min(np.searchsorted(mass, top_p + slip), len(ranked) - 1)] for slip in (-1e-5, 1e-5))
    if top_p == 1.0:
        low = high = ranked[-1]
    expected = {np.count_nonzero(distances <= min(cut, bound)) for cut in (low, high)}
    found = np.count_nonzero((distances <= kept) & (distances < np.inf)), np.count_nonzero(distances <= kept)
    assert min(expected) <= found[1]
    assert found[0] <= max(expected)
