"""The JAX sampler's noise, and what it does besides the contract that `tests/runner/test_samplers.py` holds it to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    assert SAMPLERS["jax"].sample([Case(logits, SamplingParams())]) == [INVALID_TOKEN]


@pytest.mark.parametrize("vocab_size", [37, 80, 7 * 256, 49_152])  # without blocks, and with blocks of 16 and 256
def test_first_argmax_takes_the_lowest_of_equals(vocab_size: int) -> None:
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
def test_first_argmax_of_a_row_with_a_nan_is_no_token(vocab_size: int, place: int) -> None:
    values = np.arange(vocab_size, dtype=np.float32)[None]
    values[0, place] = np.nan
    assert first_argmax(values)[0] >= vocab_size
