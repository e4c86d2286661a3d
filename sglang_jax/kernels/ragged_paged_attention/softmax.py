"""The online softmax of FlashAttention (Dao et al. 2022)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_FEW_QUERIES = 4
"""Queries are few if there are this many times more keys."""
MASKED = -1e30
"""Score of a key that a query must not see: finite, since infinities subtracted from each other are NaN."""


class Softmax(NamedTuple):
    """Over the keys so far: the largest score and the sum of exponentials (`[..., q]`), and the weighted sum of values
    (`[..., q, value_dim]`)."""

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def start(cls, rows: tuple[int, ...], value_dim: int, sinks: jax.Array | None) -> Softmax:
        """A softmax over no keys, or only over `sinks`: of shape `rows` (`[..., q]`), or one that broadcasts to it."""
        nothing = jnp.zeros((*rows, value_dim))
        if sinks is not None:
            return cls(jnp.broadcast_to(sinks, rows), jnp.ones(rows), nothing)
        return cls(jnp.full(rows, MASKED), jnp.zeros(rows), nothing)

    def add(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        visible: jax.Array | None,
        soft_cap: float | None,
    ) -> Softmax:
        """Adds a block of keys: queries `[..., q, d]`, keys `[..., k, d]`, values `[..., k, value_dim]`, visible
        `[..., q, k]`, or None if every query sees every key."""
        scores = _products(queries, keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if visible is not None:
            scores = jnp.where(visible, scores, MASKED)
        largest = jnp.maximum(self.largest, scores.max(-1))
        weights = jnp.exp(scores - largest[..., None])
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp(self.largest - largest)
        added = jnp.einsum("...qk,...kd->...qd", weights, values, precision=jax.lax.Precision.HIGHEST)
        return Softmax(
            largest,
            self.total * shrink + weights.sum(-1),
            self.weighted * shrink[..., None] + added,
        )

    def result(self) -> jax.Array:
        """The attention output; 0 for a query that saw no key."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _products(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """`[..., q, k]` of queries `[..., q, d]` and keys `[..., k, d]`. XLA's CPU backend packs the right operand first,
    which should be the queries if they are few, because packing keys takes longer than the product: with 32 decode rows
    and 3 queries per kv head, attention took 20 ms instead of 26."""
    if queries.shape[-2] * _FEW_QUERIES > keys.shape[-2]:
        return jnp.einsum("...qd,...kd->...qk", queries, keys, precision=jax.lax.Precision.HIGHEST)
    products = jnp.einsum("...kd,...qd->...kq", keys, queries, precision=jax.lax.Precision.HIGHEST)
    # Without the barrier the compiler removes the transposition and swaps the operands.
    return jax.lax.optimization_barrier(products).swapaxes(-1, -2)
