"""Convolutions over the last tokens of each channel by itself, whose last inputs are kept from step to step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.state_rows import StateRows


def convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, tails: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Each token's output from its own input and those of the `width - 1` tokens before it.

    Inputs are rounded to the type of `tails` first, in which they are kept: so a result does not depend on where chunks
    begin.

    **Arguments:** `x` `[T, channels]`; `weight` `[channels, width]`, the tap of the token itself last; `bias`
    `[channels]`; `tails` `[R, width - 1, channels]`, the last inputs of each sequence before the step, oldest first.

    **Returns:** float32 `[T, channels]`, and the tails after the step.
    """
    width = weight.shape[1]
    x = x.astype(tails.dtype)
    taps = weight.astype(jnp.float32).T
    total = x.astype(jnp.float32) * taps[-1]
    for back in range(1, width):
        total = total + _inputs_before(x, tails, rows, back).astype(jnp.float32) * taps[-1 - back]
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return total, _tails_after(x, tails, rows)


def _inputs_before(x: jax.Array, tails: jax.Array, rows: StateRows, back: int) -> jax.Array:
    """Of each token the input so many tokens before it."""
    kept = tails.shape[1]
    if rows.decode_only:
        return tails[:, kept - back]
    of_tail = tails[rows.sequences, jnp.clip(kept + rows.offsets - back, 0, kept - 1)]
    return jnp.where((rows.offsets >= back)[:, None], jnp.roll(x, back, axis=0), of_tail)


def _tails_after(x: jax.Array, tails: jax.Array, rows: StateRows) -> jax.Array:
    kept = tails.shape[1]
    if rows.decode_only:
        return jnp.concatenate((tails[:, 1:], x[:, None]), axis=1)
    places = jnp.arange(kept)
    ends, lengths = rows.query_starts[1:, None], jnp.diff(rows.query_starts)[:, None]
    computed = x[jnp.maximum(ends - kept + places, 0)]
    older = jnp.take_along_axis(tails, jnp.minimum(lengths + places, kept - 1)[..., None], axis=1)
    return jnp.where((lengths - kept + places >= 0)[..., None], computed, older)
