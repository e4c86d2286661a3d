"""The noise of the torch backend equals the JAX backend's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.jax_runner import sampler as jax_noise
from torch_backend.noise import LARGEST_NOISE, gumbel_noise, threefry_2x32

WORD = st.integers(0, 2**32 - 1)
VOCAB = 4096

_jax_bits = jax.jit(jax_noise.threefry_2x32)
_jax_noise = jax.jit(jax_noise.gumbel_noise)

LARGEST = ((17, 2**20 + 3), 7, 46124)
"""Key, position and token for which all 23 bits of the uniform variate are set."""


@settings(max_examples=60, deadline=None)
@given(key=st.tuples(WORD, WORD), position=st.integers(0, 2**31 - 1), tokens=st.lists(WORD, min_size=8, max_size=8))
def test_bits_are_those_of_jax(key: tuple[int, int], position: int, tokens: list[int]) -> None:
    ids = np.array(tokens, np.uint32)
    keys = tuple(np.uint32(word) for word in key)
    expected, _ = _jax_bits(keys, (np.full(8, position, np.uint32), ids))
    found = threefry_2x32(key, position, ids)
    assert found.dtype == np.uint32
    assert found.tolist() == np.asarray(expected).tolist()


@pytest.mark.parametrize("position", [0, 9, 2**31 - 1])
@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
def test_variates_are_those_of_jax_up_to_rounding_of_logarithms(seed: int, position: int) -> None:
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = np.asarray(
        _jax_noise(np.array([key], np.uint32), np.array([position], np.int32), np.arange(VOCAB)[None])
    )[0]
    found = gumbel_noise(key, position, np.arange(VOCAB, dtype=np.uint32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_a_variate_does_not_depend_on_the_others_computed() -> None:
    ids = np.arange(VOCAB, dtype=np.uint32)
    some = np.random.default_rng(0).permutation(ids)[:100]
    assert gumbel_noise((3, 4), 5, some).tolist() == gumbel_noise((3, 4), 5, ids)[some].tolist()


def test_no_variate_exceeds_the_stated_maximum() -> None:
    key, position, token = LARGEST
    ids = np.array([token], np.uint32)
    assert threefry_2x32(key, position, ids)[0] >> 9 == 2**23 - 1
    (variate,) = gumbel_noise(key, position, ids)
    # The logarithms of 1 - 2**-24 are exact enough: 24 log 2, and only rounding above it.
    assert variate == pytest.approx(24 * np.log(2), abs=1e-5)
    assert LARGEST_NOISE - 0.01 < variate < LARGEST_NOISE
