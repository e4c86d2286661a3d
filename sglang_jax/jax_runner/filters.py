"""The filters top-k, top-p and min-p, by the distance of a token's scaled logit below its line's largest. Distances are
not negative, so their bits as integers have the same order: a bisection finds the largest kept distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sglang_jax.kernels.kept_distance_pallas import kept_distance

_INFINITY_BITS = 0x7F800000
_BLOCK, _NEAR_BLOCKS = 16, 256
"""Tokens of a block, and the number of a line's blocks that are searched before the whole line is."""


class Filters(NamedTuple):
    """The filters of each line, `[n]`: `top_k` int32, `top_p` and `min_p` float32, `random` bool: whether they
    apply."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    random: jax.Array

    def cut_by_rank(self, vocab_size: int) -> jax.Array:
        return self.random & (self.top_k < vocab_size)

    def cut_by_mass(self) -> jax.Array:
        return self.random & (self.top_p < 1.0)

    def cut(self, vocab_size: int) -> jax.Array:
        """Lines whose filters may drop tokens, bool `[n]`."""
        return self.cut_by_rank(vocab_size) | self.cut_by_mass() | (self.random & (self.min_p > 0.0))


class Near(NamedTuple):
    """The tokens with the smallest distances of each line, and possibly others, unordered: `distances` float32 and
    `tokens` int32, `[n, m]`, with every token of a distance below `bound` float32 `[n]`. Padding has an infinite
    distance."""

    distances: jax.Array
    tokens: jax.Array
    bound: jax.Array

    @classmethod
    def none(cls, lines: int) -> Near:
        size = lines, _BLOCK * _NEAR_BLOCKS
        return cls(jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.int32), jnp.zeros(lines, jnp.float32))

    @classmethod
    def all_of(cls, distances: jax.Array) -> Near:
        tokens = lax.broadcasted_iota(jnp.int32, distances.shape, 1)
        return cls(distances, tokens, jnp.full(len(distances), jnp.inf, jnp.float32))

    @classmethod
    def of(cls, distances: jax.Array) -> Near:
        """The tokens of the blocks with the smallest distances. A block's tokens are `blocks` apart, so that comparing
        whole parts of a line finds the minima of all blocks."""
        lines, vocab_size = distances.shape
        blocks = -(-vocab_size // _BLOCK)
        filled = jnp.pad(distances, ((0, 0), (0, blocks * _BLOCK - vocab_size)), constant_values=jnp.inf)
        parts = filled.reshape(lines, _BLOCK, blocks)
        # A barrier for each: with one for both, XLA's compiler for several CPU devices ends the process.
        negated, found = map(lax.optimization_barrier, lax.top_k(-jnp.min(parts, axis=1), _NEAR_BLOCKS))
        near = jnp.take_along_axis(parts, found[:, None, :], axis=2, mode="clip").reshape(lines, -1)
        tokens = found[:, None, :] + blocks * lax.broadcasted_iota(jnp.int32, (1, _BLOCK, 1), 1)
        return cls(near, tokens.reshape(lines, -1), -negated[:, -1])

    def has_all(self, kept: jax.Array) -> jax.Array:
        """Lines, bool `[n]`, for which these include every token with a distance of at most `kept`."""
        return (kept < self.bound) | (self.bound == jnp.inf)


def has_near(vocab_size: int) -> bool:
    """Whether a vocabulary is so large that searching the nearest tokens first is faster."""
    return vocab_size >= 8 * _BLOCK * _NEAR_BLOCKS


def largest_kept(distances: jax.Array, near: Near | None, filters: Filters) -> jax.Array:
    """The largest distance that each line of `distances` float32 `[n, vocab]` keeps, float32 `[n]`; infinity if it
    keeps all tokens. `near`: their nearest tokens, or None to search all. Lines whose cut-off is not among them are
    searched whole, and lines without filters not at all."""
    vocab_size = distances.shape[1]
    mass = lax.cond(
        jnp.any(filters.cut_by_mass() & ~filters.cut_by_rank(vocab_size)),
        lambda: jnp.sum(jnp.exp(-distances), axis=-1),
        lambda: jnp.ones(len(distances), jnp.float32),
    )

    def everywhere() -> jax.Array:
        return _largest_kept(Near.all_of(distances), mass, filters, vocab_size)

    if near is None:
        return everywhere()

    def nearby() -> jax.Array:
        return _largest_kept(near, mass, filters, vocab_size)

    needed = jnp.any(filters.cut(vocab_size))
    found = lax.cond(needed, nearby, lambda: jnp.full(len(distances), jnp.inf, jnp.float32))
    settled = ~filters.cut(vocab_size) | near.has_all(found)
    return lax.cond(jnp.all(settled), lambda: found, lambda: jnp.where(settled, found, everywhere()))


def largest_kept_on_tpu(distances: jax.Array, filters: Filters) -> jax.Array:
    """`largest_kept` by a Pallas kernel."""
    vocab_size = distances.shape[1]
    by_rank, by_mass = filters.cut_by_rank(vocab_size), filters.cut_by_mass()
    kept = lax.cond(
        jnp.any(by_rank | by_mass),
        lambda: kept_distance(distances, filters.top_k, filters.top_p, by_rank, by_mass),
        lambda: jnp.full(len(distances), jnp.inf, jnp.float32),
    )
    return jnp.minimum(kept, -jnp.log(filters.min_p))


def _largest_kept(near: Near, mass: jax.Array, filters: Filters, vocab_size: int) -> jax.Array:
    """`largest_kept` by the tokens of `near`, infinity if these do not contain it. `mass` `[n]`: see
    `distance_of_mass`."""
    values = near.distances
    everything = jnp.full(len(values), jnp.inf, jnp.float32)
    by_rank = filters.top_k < vocab_size
    ranked = lax.cond(
        jnp.any(filters.cut_by_rank(vocab_size)),
        lambda: jnp.where(by_rank, distance_of_rank(values, filters.top_k), everything),
        lambda: everything,
    )

    def by_mass() -> jax.Array:
        own = jnp.where(by_rank, jnp.nan, mass)
        return jnp.where(filters.top_p < 1.0, distance_of_mass(values, ranked, own, filters.top_p), ranked)

    kept = lax.cond(jnp.any(filters.cut_by_mass()), by_mass, lambda: ranked)
    kept = jnp.minimum(kept, -jnp.log(filters.min_p))
    # A fraction of the mass that top-k keeps needs all tokens that it keeps.
    return jnp.where(by_rank & (filters.top_p < 1.0) & ~near.has_all(ranked), everything, kept)


def distance_of_rank(values: jax.Array, top_k: jax.Array) -> jax.Array:

    def enough(limits: jax.Array) -> jax.Array:
        return jnp.sum((values <= limits[:, None]).astype(jnp.int32), axis=-1) >= top_k

    return _least_distance(enough, len(values))


def distance_of_mass(values: jax.Array, kept: jax.Array, mass: jax.Array, top_p: jax.Array) -> jax.Array:
    """The smallest distance within which tokens have `top_p` of the probability kept so far, float32 `[n]` (Holtzman et
    al. 2019). `mass`: that probability, unscaled; NaN to sum it over the kept values."""
    weights = jnp.where(values <= kept[:, None], jnp.exp(-values), 0.0)
    weights = lax.optimization_barrier(weights)
    wanted = top_p * jnp.where(jnp.isnan(mass), jnp.sum(weights, axis=-1), mass)

    def enough(limits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values <= limits[:, None], weights, 0.0), axis=-1) >= wanted

    return jnp.minimum(_least_distance(enough, len(values)), kept)


def _least_distance(enough: Callable[[jax.Array], jax.Array], lines: int) -> jax.Array:
    """The smallest float32 in [0, infinity] for which `enough` (`[n]` floats to `[n]` bools, monotone) holds. It
    bisects over the float's bits: exact after 31 passes, and 15 to 30 times faster on the CPU than sorting a
    vocabulary."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    bounds = (jnp.zeros(lines, jnp.int32), jnp.full(lines, np.int32(_INFINITY_BITS), jnp.int32))
    _, least = lax.fori_loop(0, 31, halve, bounds)
    return lax.bitcast_convert_type(least, jnp.float32)
