"""The JAX sampler's noise, and what it does besides the contract that `tests/runner/test_samplers.py` holds it to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from helpers.samplers import SAMPLERS, Case
from jax.extend.random import threefry_2x32 as jax_threefry_2x32
from scipy import stats

from sglang_jax.jax_runner.noise import gumbel_noise, threefry_2x32
from sglang_jax.jax_runner.sampler import first_argmax
from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.sampling.params import SamplingParams

_noise = jax.jit(gumbel_noise, static_argnums=2)


def test_noise_bits_are_threefry() -> None:
    key, counter = np.array([1234567, 987654321], np.uint32), np.arange(64, dtype=np.uint32)
    expected = np.asarray(jax_threefry_2x32(key, counter))
    words = threefry_2x32((jnp.uint32(key[0]), jnp.uint32(key[1])), (counter[:32], counter[32:]))
    assert np.concatenate([np.asarray(word) for word in words]).tolist() == expected.tolist()


def test_noise_is_gumbel_and_differs_by_seed_word_and_position() -> None:
    seeds = np.array([[5, 0], [5, 0], [6, 0], [5, 1]], np.uint32)
    noise = np.asarray(_noise(seeds, np.array([9, 10, 9, 9], np.int32), 20_000))
    assert np.isfinite(noise).all()
    for row in noise:
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-4
    correlations = np.corrcoef(noise) - np.eye(4)
    assert np.abs(correlations).max() < 0.03


def test_a_logit_of_minus_infinity_spoils_its_row() -> None:
    logits = np.zeros(37, np.float32)
    logits[3] = -np.inf
    assert SAMPLERS["jax"].draw([Case(logits, SamplingParams())]) == [INVALID_TOKEN]


def test_first_argmax_takes_the_lowest_of_equals() -> None:
    assert first_argmax(np.array([[1.0, 3.0, 3.0], [-np.inf, -np.inf, -2.0]])).tolist() == [1, 2]
