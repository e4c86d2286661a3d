"""The table of experts' tiles on TPUs, in one small kernel: XLA makes about ten operations of it, each of about a
microsecond."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

Ref = Any
"""A Pallas reference to memory; its type is not public."""


def tile_table(
    sizes: jax.Array, rows: int, tiles: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The tiles of `rows` rows of experts with `sizes` rows each, int32 `[experts]`: `experts`, `used`, `filled` and
    `first` of `SortedTiles`, whose `tiles` suffice for all rows."""
    row = jax.ShapeDtypeStruct((1, tiles), jnp.int32)
    experts, used, filled, first = pl.pallas_call(
        partial(_fill, rows=rows),
        out_shape=(row, jax.ShapeDtypeStruct((1, 1), jnp.int32), row, row),
        interpret=interpret,
        name="expert_tiles",
    )(sizes[None])
    return experts[0], used[0], filled[0], first[0]


def _fill(sizes: Ref, experts: Ref, used: Ref, filled: Ref, first: Ref, *, rows: int) -> None:
    count, tiles = sizes.shape[1], experts.shape[1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    of_lanes = sizes[...]

    def sums(numbers: jax.Array, wanted: jax.Array) -> jax.Array:
        """Of the lanes of `[1, experts]` that each row wants: `[experts, 1]`."""
        return jnp.where(wanted, numbers, 0).sum(1, keepdims=True, dtype=jnp.int32)

    own_tiles = divided_up(of_lanes, rows)
    ends, before_own = sums(own_tiles, column <= row), sums(own_tiles, column < row)
    own_sizes, starts = sums(of_lanes, column == row), sums(of_lanes, column < row)
    total = own_tiles.sum(1, keepdims=True, dtype=jnp.int32)
    number = jax.lax.broadcasted_iota(jnp.int32, (1, tiles), 1)
    # Tiles without rows have the expert of the last one with rows, so that no other is copied.
    existing = jnp.minimum(number, jnp.maximum(total - 1, 0))
    expert = jnp.minimum((existing >= ends).astype(jnp.int32).sum(0, keepdims=True, dtype=jnp.int32), count - 1)
    is_own = jax.lax.broadcasted_iota(jnp.int32, (count, tiles), 0) == expert

    def of_expert(numbers: jax.Array) -> jax.Array:
        """Of `[experts, 1]` that of each tile's expert: `[1, tiles]`."""
        return jnp.where(is_own, numbers, 0).sum(0, keepdims=True, dtype=jnp.int32)

    before = (existing - of_expert(before_own)) * rows
    experts[...], used[...] = expert, total
    filled[...] = jnp.where(number < total, jnp.clip(of_expert(own_sizes) - before, 0, rows), 0)
    first[...] = of_expert(starts) + before


def divided_up(numbers: jax.Array, by: int) -> jax.Array:
    """`numbers` int32, below 2**23, divided by `by`, rounded up. TPUs divide no vectors of integers."""
    # Such a product is not rounded over a whole number, but may be rounded under the one that it is.
    found = (numbers.astype(jnp.float32) * (1.0 / by)).astype(jnp.int32)
    return jnp.where(found * by < numbers, found + 1, found)
