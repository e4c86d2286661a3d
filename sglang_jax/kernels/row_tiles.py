"""Functions of tokens in tiles of a fixed number of rows. A compiler chooses the order of sums by the shape of a
product, so a token's result would depend on how many others a program computes. All programs share a loop over tiles."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

TILE_ROWS, TILE_ROWS_ON_TPU = 16, 128
"""Rows of a tile. Each tile reads the weights again, and a step of fewer rows wastes the rest of its tile. A TPU
multiplies 128 rows in the time in which it reads the weights."""


def in_tiles(function: Callable[[jax.Array], jax.Array], x: jax.Array, rows: int | None) -> jax.Array:
    """`function(x)`, `[T, ...]` → `[T, ...]`, in tiles of `rows` tokens, the last filled up with zeros; None for all
    tokens at once."""
    if rows is None:
        return function(x)
    tokens = len(x)
    tiles = -(-tokens // rows)
    padded = jnp.pad(x, ((0, tiles * rows - tokens), *[(0, 0)] * (x.ndim - 1)))
    found = jax.lax.map(function, padded.reshape(tiles, rows, *x.shape[1:]))
    return found.reshape(tiles * rows, *found.shape[2:])[:tokens]
