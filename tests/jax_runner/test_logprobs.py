"""Logprobs on the device against scipy's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from sglang_jax.jax_runner.logprobs import Logprobs, prompt_logprobs, token_logprobs
from sglang_jax.runner.plan import INVALID_TOKEN

RNG = np.random.default_rng(8)
VOCAB = 30


def test_sampled_tokens_and_alternatives() -> None:
    logits = RNG.normal(0, 4, (3, VOCAB)).astype(np.float32)
    found = jax.jit(token_logprobs)(logits, np.array([4, 0, INVALID_TOKEN]), np.int32(1))
    expected = log_softmax(logits, axis=-1)
    assert np.asarray(found.logprobs)[:2] == pytest.approx([expected[0, 4], expected[1, 0]], abs=1e-5)
    assert found.top_ids.tolist() == np.argsort(-logits, axis=-1)[:, :20].tolist()
    assert np.asarray(found.top_logprobs) == pytest.approx(-np.sort(-expected, axis=-1)[:, :20], abs=1e-5)
    without = jax.jit(token_logprobs)(logits, np.array([4, 0, 1]), np.int32(0))
    assert not np.asarray(without.top_logprobs).any()


def test_a_vocabulary_below_twenty_has_fewer_alternatives() -> None:
    found = token_logprobs(jnp.zeros((2, 7)), jnp.zeros(2, jnp.int32), jnp.int32(20))
    assert found.top_ids.tolist() == [list(range(7))] * 2


@pytest.mark.parametrize("positions", [[0], [5, 63, 64, 149], [130, 131], []])
def test_prompt_positions_in_several_blocks(positions: list[int]) -> None:
    hidden = RNG.normal(size=(192, 8)).astype(np.float32)
    head = RNG.normal(size=(8, VOCAB)).astype(np.float32)
    targets = np.full(192, -1, np.int32)
    targets[positions] = RNG.integers(0, VOCAB, len(positions))
    blocks = []

    def to_logprobs(block: jax.Array, tokens: jax.Array, alternatives: jax.Array) -> Logprobs:
        jax.debug.callback(lambda size: blocks.append(int(size)), block.shape[0])
        return token_logprobs(block @ head, tokens, alternatives)

    run = jax.jit(prompt_logprobs, static_argnums=(4, 5))
    found = jax.block_until_ready(run(hidden, targets, np.int32(5), np.int32(150), to_logprobs, VOCAB))
    jax.effects_barrier()
    expected = log_softmax(hidden @ head, axis=-1)
    assert np.asarray(found.logprobs)[positions] == pytest.approx(expected[positions, targets[positions]], abs=1e-5)
    order = np.argsort(-expected[positions], axis=-1)[:, :20]
    assert np.asarray(found.top_ids)[positions].tolist() == order.tolist()
    # Blocks without a target are not computed.
    assert blocks == [64] * len({position // 64 for position in positions})


def test_logprobs_in_tiles_do_not_depend_on_the_number_of_rows() -> None:
    """Without tiles, sums of 4 or 8 rows differ from those of 64."""
    logits = jnp.asarray(3 * np.random.default_rng(0).standard_normal((64, 384)).astype(np.float32))

    @jax.jit
    def logprobs(logits: jax.Array) -> jax.Array:
        return token_logprobs(logits, jnp.zeros(len(logits), jnp.int32), jnp.int32(0), tile_rows=16).logprobs

    whole = logprobs(logits)
    for rows in (4, 8):
        np.testing.assert_array_equal(logprobs(logits[:rows]), whole[:rows])
