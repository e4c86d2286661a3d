"""Which tokens top-k, top-p and min-p keep, by how far a token's scaled logit lies below its line's largest.

Such a distance is never negative, so its bits as an integer have the same order as its value; a filter is a largest
distance kept, and is found by its bits.
"""

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
"""Tokens of a block, and how many blocks of a line are searched before all of it is."""


class Filters(NamedTuple):
    """Of each line, `[n]`: `top_k` int32, `top_p` and `min_p` float32, and bool `random`: they are asked for."""

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    random: jax.Array

    def cut_by_rank(self, vocab_size: int) -> jax.Array:
        return self.random & (self.top_k < vocab_size)

    def cut_by_mass(self) -> jax.Array:
        return self.random & (self.top_p < 1.0)

    def cut(self, vocab_size: int) -> jax.Array:
        """bool `[n]`: something is asked for that may drop tokens."""
        return self.cut_by_rank(vocab_size) | self.cut_by_mass() | (self.random & (self.min_p > 0.0))


class Near(NamedTuple):
    """Tokens of each line that have the smallest distances, and perhaps some more.

    `distances` float32 and `tokens` int32, `[n, m]`, in no order; every token of the line whose distance is below
    `bound`, float32 `[n]`, is among them. Places that fill a vocabulary up are at an infinite distance.
    """

    distances: jax.Array
    tokens: jax.Array
    bound: jax.Array

    @classmethod
    def none(cls, lines: int) -> Near:
        """Knows nothing: its bound is 0."""
        size = lines, _BLOCK * _NEAR_BLOCKS
        return cls(jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.int32), jnp.zeros(lines, jnp.float32))

    @classmethod
    def all_of(cls, distances: jax.Array) -> Near:
        """All tokens of the lines."""
        tokens = lax.broadcasted_iota(jnp.int32, distances.shape, 1)
        return cls(distances, tokens, jnp.full(len(distances), jnp.inf, jnp.float32))

    @classmethod
    def of(cls, distances: jax.Array) -> Near:
        """Those of the blocks that have the smallest distances. A block's tokens lie `blocks` apart: the least of all
        blocks are found by comparing whole parts of a line."""
        lines, vocab_size = distances.shape
        blocks = -(-vocab_size // _BLOCK)
        filled = jnp.pad(distances, ((0, 0), (0, blocks * _BLOCK - vocab_size)), constant_values=jnp.inf)
        parts = filled.reshape(lines, _BLOCK, blocks)
        negated, found = lax.optimization_barrier(lax.top_k(-jnp.min(parts, axis=1), _NEAR_BLOCKS))
        near = jnp.take_along_axis(parts, found[:, None, :], axis=2, mode="clip").reshape(lines, -1)
        tokens = found[:, None, :] + blocks * lax.broadcasted_iota(jnp.int32, (1, _BLOCK, 1), 1)
        return cls(near, tokens.reshape(lines, -1), -negated[:, -1])

    def has_all(self, kept: jax.Array) -> jax.Array:
        """bool `[n]`: every token that can be sampled from a line that keeps distances up to `kept` is among these."""
        return (kept < self.bound) | (self.bound == jnp.inf)


def has_near(vocab_size: int) -> bool:
    """Whether a vocabulary is so large that looking at the nearest tokens first pays."""
    return vocab_size >= 8 * _BLOCK * _NEAR_BLOCKS


def largest_kept(distances: jax.Array, near: Near | None, filters: Filters) -> jax.Array:
    """The largest distance that each line keeps, float32 `[n]`, infinity where all are kept.

    **Arguments:** `distances`: float32 `[n, vocab]`; `near`: of them, or None to search all; lines whose cut-off it
    does not have are searched whole. It is looked at where something is asked for that may drop tokens.
    """
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

    asked = jnp.any(filters.cut(vocab_size))
    found = lax.cond(asked, nearby, lambda: jnp.full(len(distances), jnp.inf, jnp.float32))
    told = ~filters.cut(vocab_size) | near.has_all(found)
    return lax.cond(jnp.all(told), lambda: found, lambda: jnp.where(told, found, everywhere()))


def largest_kept_on_tpu(distances: jax.Array, filters: Filters) -> jax.Array:
    """As `largest_kept`, by a kernel."""
    vocab_size = distances.shape[1]
    by_rank, by_mass = filters.cut_by_rank(vocab_size), filters.cut_by_mass()
    kept = lax.cond(
        jnp.any(by_rank | by_mass),
        lambda: kept_distance(distances, filters.top_k, filters.top_p, by_rank, by_mass),
        lambda: jnp.full(len(distances), jnp.inf, jnp.float32),
    )
    return jnp.minimum(kept, -jnp.log(filters.min_p))


def _largest_kept(near: Near, mass: jax.Array, filters: Filters, vocab_size: int) -> jax.Array:
    """As these tokens tell it, infinity where they do not; `mass` `[n]`: see `distance_of_mass`."""
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
    # A share of what the rank keeps is known only with all that it keeps.
    return jnp.where(by_rank & (filters.top_p < 1.0) & ~near.has_all(ranked), everything, kept)


def distance_of_rank(values: jax.Array, top_k: jax.Array) -> jax.Array:
    """Distance of the k-th likeliest token, float32 `[n]`."""

    def enough(limits: jax.Array) -> jax.Array:
        return jnp.sum((values <= limits[:, None]).astype(jnp.int32), axis=-1) >= top_k

    return _least_distance(enough, len(values))


def distance_of_mass(values: jax.Array, kept: jax.Array, mass: jax.Array, top_p: jax.Array) -> jax.Array:
    """Least distance within which lies `top_p` of the probability kept so far, float32 `[n]` (Holtzman et al. 2019).
    `mass`: that probability, unscaled, NaN where it is that of the values kept."""
    weights = jnp.where(values <= kept[:, None], jnp.exp(-values), 0.0)
    weights = lax.optimization_barrier(weights)
    wanted = top_p * jnp.where(jnp.isnan(mass), jnp.sum(weights, axis=-1), mass)

    def enough(limits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values <= limits[:, None], weights, 0.0), axis=-1) >= wanted

    return jnp.minimum(_least_distance(enough, len(values)), kept)


def _least_distance(enough: Callable[[jax.Array], jax.Array], lines: int) -> jax.Array:
    """The least float32 in [0, infinity] for which `enough` (`[n]` floats to `[n]` bools, monotone) holds.

    Bisects over the bits of the float: exact after 31 passes over the values, and 15 to 30 times faster on the CPU than
    sorting a vocabulary. Infinity if it holds nowhere below.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    bounds = (jnp.zeros(lines, jnp.int32), jnp.full(lines, np.int32(_INFINITY_BITS), jnp.int32))
    _, least = lax.fori_loop(0, 31, halve, bounds)
    return lax.bitcast_convert_type(least, jnp.float32)
