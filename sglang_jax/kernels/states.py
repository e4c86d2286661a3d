"""States of recurrent layers from one step to the next: read from their slots, and written back.

With attention by Pallas's kernels, those for states; else XLA's operations.
"""

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
from sglang_jax.kernels.state_scan import ScanInputs, scan, scan_drafts
from sglang_jax.kernels.state_scan_pallas import scan_in_place

Inputs = TypeVar("Inputs", jax.Array, ScanInputs)
"""What a kernel is given of each token: arrays with a leading axis of tokens."""


def scan_states(
    implementation: AttentionImplementation, inputs: ScanInputs, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `state_scan`.

    **Arguments:** `pool` `[slots, heads, key_dim, value_dim]`, float32 or bfloat16, in which matrices are rounded once
    a step.

    **Returns:** outputs float32 `[T, heads, value_dim]`, those of padding of no account, and the pool after the step.
    """
    if implementation.for_tpu:
        kernel = partial(scan_in_place, checked=implementation.checked)
        return _draft_by_draft(kernel, inputs, pool, rows)
    first = rows.without_drafts()
    outputs, states = scan(inputs, first.read(pool).astype(jnp.float32), first)
    pool = first.write(pool, states)
    return (outputs, pool) if rows.drafts is None else scan_drafts(inputs, outputs, states, pool, rows)


def convolve_states(
    implementation: AttentionImplementation,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """See `causal_convolution.convolve`.

    **Arguments:** `pool` `[slots, width - 1, channels]`, or tiled (see `causal_convolution`), as the kernels take it.

    **Returns:** outputs float32 `[T, channels]`, those of padding of no account, and the pool after the step.
    """
    if implementation.for_tpu:
        kernel = partial(_convolve_in_place, weight, bias, implementation.checked)
        return _draft_by_draft(kernel, x, pool, rows)
    return convolve_with_pool(x, weight, bias, pool, rows)


def _convolve_in_place(
    weight: jax.Array, bias: jax.Array | None, checked: bool, x: jax.Array, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    return convolve_in_place(x, weight, bias, pool, rows, checked=checked)


def _draft_by_draft(
    kernel: Callable[[Inputs, jax.Array, StateRows], tuple[jax.Array, jax.Array]],
    inputs: Inputs,
    pool: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """A step of a `kernel` that takes no drafts: all rows, then the first drafts of rows that have any, then the second
    ones, as steps of their own. A state is read from its slot and written to the next: a draft costs what a row costs,
    and a step without drafts what it costs elsewhere."""
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
