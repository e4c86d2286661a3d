"""Steps of recurrent layers on a pool of states: Pallas kernels if attention uses them, XLA's operations otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.kernels.causal_convolution import convolve_with_pool
from sglang_jax.kernels.causal_convolution_pallas import convolve_in_place
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs, scan, scan_drafts, scan_tokens
from sglang_jax.kernels.state_scan_pallas import scan_in_place

Inputs = TypeVar("Inputs", jax.Array, ScanInputs)
"""A kernel's inputs: arrays with a leading axis of tokens."""


def scan_states(
    implementation: AttentionImplementation, inputs: ScanInputs, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `state_scan`. Returns outputs float32 `[T, heads, value_dim]`, undefined for padding, and the pool after the
    step. `pool` `[slots, heads, key_dim, value_dim]`, float32 or bfloat16; a bfloat16 state is rounded once a step."""
    if implementation.for_tpu:
        kernel = partial(scan_in_place, checked=implementation.checked)
        if implementation.fixed:
            kernel = partial(_token_by_token, kernel)
        return _draft_by_draft(kernel, inputs, pool, rows)
    first = rows.without_drafts()
    compute = scan_tokens if implementation.fixed else scan
    outputs, states = compute(inputs, first.read(pool).astype(jnp.float32), first)
    pool = first.write(pool, states)
    if rows.drafts is None:
        return outputs, pool
    return scan_drafts(inputs, outputs, states, pool, rows, fixed=implementation.fixed)


def convolve_states(
    implementation: AttentionImplementation,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """See `causal_convolution.convolve`. Returns outputs float32 `[T, channels]`, undefined for padding, and the pool
    after the step. `pool` `[slots, width - 1, channels]`, or tiled for the Pallas kernels (see
    `causal_convolution`)."""
    if implementation.for_tpu:
        kernel = partial(_convolve_in_place, weight, bias, implementation)
        return _draft_by_draft(kernel, x, pool, rows)
    return convolve_with_pool(x, weight, bias, pool, rows, implementation.tile_rows)


def _convolve_in_place(
    weight: jax.Array,
    bias: jax.Array | None,
    implementation: AttentionImplementation,
    x: jax.Array,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    return convolve_in_place(x, weight, bias, pool, rows, checked=implementation.checked, fixed=implementation.fixed)


def _token_by_token(
    kernel: Callable[[ScanInputs, jax.Array, StateRows], tuple[jax.Array, jax.Array]],
    inputs: ScanInputs,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """Runs a `kernel` for the first tokens of all sequences, then for the second tokens, and so on, each as a decode
    row: a token's result does not depend on the chunk that it is in. Reads and writes a sequence's state for each of
    its tokens."""

    chunks, tokens = rows.as_chunks(), len(inputs.values)

    def next_tokens(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, pool = carry
        step, places = chunks.of_token(number)
        found, pool = kernel(jax.tree.map(lambda x: x.at[places].get(mode="clip"), inputs), pool, step)
        # Results of padding are written past the end.
        places = jnp.where(jnp.arange(len(places)) < step.num_decode, places, tokens)
        return outputs.at[places].set(found, mode="drop"), pool

    longest = jnp.max(jnp.diff(chunks.query_starts))
    return lax.fori_loop(0, longest, next_tokens, (jnp.zeros_like(inputs.values), pool))


def _draft_by_draft(
    kernel: Callable[[Inputs, jax.Array, StateRows], tuple[jax.Array, jax.Array]],
    inputs: Inputs,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """Runs a `kernel` that knows no drafts: once for all rows, then once for the first draft of each row that has one,
    then for the second drafts, and so on. A draft reads the slot that the sequence before it has written, so it costs
    as much as a row; a step without drafts costs nothing extra."""
    outputs, pool = kernel(inputs, pool, rows.without_drafts())
    if rows.drafts is None:
        return outputs, pool

    def next_drafts(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, pool = carry
        step = rows.of_draft(number)
        found, pool = kernel(jax.tree.map(lambda x: x[step.places], inputs), pool, step.rows)
        wanted = step.wanted.reshape(-1, *[1] * (outputs.ndim - 1))
        return jnp.where(wanted, found[step.numbers], outputs), pool

    return lax.fori_loop(1, jnp.max(rows.drafts) + 1, next_drafts, (outputs, pool))
