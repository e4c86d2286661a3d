"""Convolutions and matrices of recurrent layers in steps of rows of any length, against token-by-token computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.state_steps import StateStep, random_scan, splits

from sglang_jax.kernels.causal_convolution import convolve_with_pool, tail_shape
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import BLOCK, ScanInputs, reference_scan, scan

TOKENS, ROWS, SLOTS = 4 * BLOCK, 6, 16


def rows_of(step: StateStep) -> StateRows:
    """A step in a program of this many tokens and rows, or in a decode program."""
    decode_only = step.num_decode == len(step.counts)
    counts = step.counts + [int(decode_only)] * (ROWS - len(step.counts))
    starts = np.concatenate(([0], np.cumsum(counts)))
    tokens = ROWS if decode_only else TOKENS
    sequences = np.minimum(np.searchsorted(starts[1:], np.arange(tokens), side="right"), ROWS - 1)
    padding = [0] * (ROWS - len(step.counts))
    return StateRows(
        begin=jnp.array(step.begin + padding, jnp.int32),
        fresh=jnp.array(step.fresh + [True] * len(padding)),
        own=jnp.array(step.own + padding, jnp.int32),
        sequences=jnp.asarray(sequences),
        offsets=jnp.asarray(np.arange(tokens) - starts[sequences]),
        query_starts=jnp.asarray(starts, jnp.int32),
        num_decode=jnp.int32(step.num_decode),
        decode_only=decode_only,
    )


@jax.jit
def run_scan(inputs: ScanInputs, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    outputs, states = scan(inputs, rows.read(pool), rows)
    return outputs, rows.write(pool, states)


@jax.jit
def run_convolution(x: jax.Array, weight: jax.Array, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    return convolve_with_pool(x, weight, None, pool, rows)


def padded(x: np.ndarray, rows: StateRows) -> jax.Array:
    """NaN after the step's tokens: it must not be read."""
    length = len(rows.sequences)
    return jnp.asarray(np.concatenate((x, np.full((length - len(x), *x.shape[1:]), np.nan, np.float32))))


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
def test_any_split_gives_the_outputs_and_state_of_single_tokens(delta: bool) -> None:
    arrays = random_scan(delta)
    whole = ScanInputs(*(None if array is None else jnp.asarray(array) for array in arrays))
    expected, last = reference_scan(whole, jnp.zeros((4, 8, 16)))
    pool = jnp.full((SLOTS, 4, 8, 16), jnp.nan)
    for steps, slot in splits(len(expected)):
        for step in steps:
            rows = rows_of(step)
            parts = [None if array is None else padded(array[step.tokens], rows) for array in arrays]
            found, pool = run_scan(ScanInputs(*parts), pool, rows)
            np.testing.assert_allclose(found[: len(step.tokens)], expected[step.tokens], rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(pool[slot], last, rtol=2e-4, atol=2e-5)
        pool = pool.at[0].set(jnp.nan)


@pytest.mark.parametrize("tiled", [False, True], ids=["plain slots", "tiled slots"])
def test_any_split_gives_the_same_convolutions(tiled: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3 * BLOCK, 5), np.float32), rng.standard_normal((5, 4), np.float32)
    expected = np.stack([np.convolve(channel, taps[::-1])[: len(x)] for channel, taps in zip(x.T, weight, strict=True)])
    pool = jnp.full((SLOTS, *tail_shape(3, 5, tiled=tiled)), jnp.nan)
    for steps, slot in splits(len(x)):
        for step in steps:
            rows = rows_of(step)
            found, pool = run_convolution(padded(x[step.tokens], rows), jnp.asarray(weight), pool, rows)
            np.testing.assert_allclose(found[: len(step.tokens)], expected.T[step.tokens], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(pool[slot].reshape(3, -1)[:, :5], x[-3:])
        pool = pool.at[0].set(jnp.nan)


def test_each_device_has_whole_tiles_of_its_own_channels() -> None:
    assert tail_shape(3, 2 * 1100, tiled=False, shards=2) == (3, 2200)
    assert tail_shape(3, 2 * 1100, tiled=True, shards=2) == (3, 2 * 16, 128)
    assert tail_shape(3, 2 * 1024, tiled=True, shards=2) == (3, 2 * 8, 128)
