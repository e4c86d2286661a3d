"""States of recurrent layers from one step to the next: read from their slots, and written back.

With attention by Pallas's kernels, those for states; else XLA's operations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.causal_convolution import convolve_with_pool
from sglang_jax.kernels.causal_convolution_pallas import convolve_in_place
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs, scan, scan_drafts
from sglang_jax.kernels.state_scan_pallas import scan_in_place


def scan_states(
    implementation: AttentionImplementation, inputs: ScanInputs, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `state_scan`.

    **Arguments:** `pool` `[slots, heads, key_dim, value_dim]`, float32 or bfloat16, in which matrices are rounded once
    a step.

    **Returns:** outputs float32 `[T, heads, value_dim]`, those of padding of no account, and the pool after the step.
    """
    if implementation.for_tpu:
        return scan_in_place(inputs, pool, rows, checked=implementation.checked)
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
        return convolve_in_place(x, weight, bias, pool, rows, checked=implementation.checked)
    return convolve_with_pool(x, weight, bias, pool, rows)
