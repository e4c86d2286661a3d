"""Functions of tokens in tiles of a fixed number of rows. A compiler chooses the order of sums, and what it fuses, by
shapes, so a token's result would depend on how many others a program computes. All programs share a loop over tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

TILE_ROWS, TILE_ROWS_ON_TPU = 16, 128
"""Rows of a tile. Each tile reads the weights again, and a step of fewer rows wastes the rest of its tile. A TPU
multiplies 128 rows in the time in which it reads the weights."""


def in_tiles(function: Callable[[Any], Any], x: Any, rows: int | None) -> Any:
    """`function(x)`, for arrays `[T, ...]`, or trees of them, in tiles of `rows` tokens, the last filled up with zeros;
    None for all tokens at once."""
    if rows is None:
        return function(x)
    tokens = len(jax.tree.leaves(x)[0])
    tiles = -(-tokens // rows)
    # Room for two tiles at least: the compiler moves work on all rows out of a loop, and fuses it with other work.
    room = max(tiles, 2) * rows
    # The compiler must not simplify the body for constants, such as the zeros of a full program.
    padded = lax.optimization_barrier(jax.tree.map(lambda each: _padded(each, room), x))

    def tile(number: jax.Array, found: Any) -> Any:
        part = jax.tree.map(lambda each: _in_rows(lax.dynamic_slice_in_dim(each, number * rows, rows)), padded)
        return jax.tree.map(
            lambda all_, one: lax.dynamic_update_slice_in_dim(all_, _in_rows(one), number * rows, 0),
            found,
            function(part),
        )

    of_tile = jax.eval_shape(lambda: function(jax.tree.map(lambda each: each[:rows], padded)))
    empty = jax.tree.map(lambda each: jnp.zeros((room, *each.shape[1:]), each.dtype), of_tile)
    # With a number of tiles that the compiler does not know, a single tile is a loop too.
    count = lax.optimization_barrier(jnp.int32(tiles))
    return jax.tree.map(lambda each: each[:tokens], lax.fori_loop(0, count, tile, empty))


def _in_rows(x: jax.Array) -> jax.Array:
    """The array with one row after the other in memory. Otherwise the compiler orders the axes for what follows the
    loop, by the number of rows, and computes the body in that order: libtpu 0.0.51 rotated queries with tokens last for
    2 rows, and with the numbers of a head last for 32."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)))
