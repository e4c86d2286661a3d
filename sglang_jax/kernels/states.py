"""Matrices of recurrent layers from one step to the next: read from their slots, and written back."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs, scan
from sglang_jax.kernels.state_scan_pallas import scan_in_place


def scan_states(
    implementation: AttentionImplementation, inputs: ScanInputs, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `state_scan`. With attention by Pallas's kernels, those for states; else XLA's operations.

    **Arguments:** `pool` `[slots, heads, key_dim, value_dim]`, float32 or bfloat16, in which matrices are rounded once
    a step.

    **Returns:** outputs float32 `[T, heads, value_dim]`, those of padding of no account, and the pool after the step.
    """
    if implementation.for_tpu:
        return scan_in_place(inputs, pool, rows, checked=implementation.checked)
    outputs, states = scan(inputs, rows.read(pool).astype(jnp.float32), rows)
    return outputs, rows.write(pool, states)
