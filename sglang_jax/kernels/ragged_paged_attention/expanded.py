"""Latent attention in the expanded form, for XLA on CPU and GPU. It expands one tile of cached latents at a time into
the keys and values of all heads, and updates the online softmax of each query at or after the tile. Trip counts (of
tiles over all rows, and of query blocks that see a tile) are data, so that one program serves all lengths and a step
without such rows takes no time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import gather_kv
from sglang_jax.kernels.ragged_paged_attention.options import Sequences
from sglang_jax.kernels.ragged_paged_attention.softmax import MASKED, Softmax

_KEYS_PER_TILE = 256
_QUERIES_PER_BLOCK = 128


def expanded_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    batch: Sequences,
    rows: jax.Array,
    key_up: jax.Array,
    value_up: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention of the rows that `rows` bool `[R]` selects. Scores, softmax, sums, and expanded keys and values are
    float32.

    `queries` `[T, heads, key_dim + rotary_dim]`; `kv_pages`: plain pages of latents, each followed by its rotary key;
    `key_up` `[heads, key_dim, latent]`; `value_up` `[heads, value_dim, latent]`. Returns `[T, heads, value_dim]` in the
    type of `queries`; 0 for tokens of other rows.
    """
    tokens, heads, _ = queries.shape
    (_, key_dim, latent), value_dim, page_size = key_up.shape, value_up.shape[1], kv_pages.shape[3]
    width, stored = min(_QUERIES_PER_BLOCK, tokens), latent + queries.shape[2] - key_dim
    columns = max(_KEYS_PER_TILE // page_size, 1)
    tile_keys = columns * page_size
    page_table = jnp.pad(batch.page_table, ((0, 0), (0, -batch.page_table.shape[1] % columns)))
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    tiles = jnp.where(rows, -(-batch.kv_lens // tile_keys), 0)
    tile_ends = jnp.cumsum(tiles)
    up, precision = jnp.concatenate([key_up, value_up], axis=1), None
    if up.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    scaled = jnp.pad(queries.astype(jnp.float32) * scale, ((0, width), (0, 0), (0, 0))).swapaxes(0, 1)

    def tile(index: jax.Array, softmax: Softmax) -> Softmax:
        sequence = jnp.searchsorted(tile_ends, index, side="right", method="compare_all")
        number = tiles[sequence] - (tile_ends[sequence] - index)
        length, start, end = batch.kv_lens[sequence], starts[sequence], ends[sequence]
        pages = jax.lax.dynamic_slice_in_dim(page_table[sequence], number * columns, columns)
        places = number * tile_keys + jnp.arange(tile_keys)
        cached = gather_kv(kv_pages, pages, stored, value_dim=latent)[0][0]
        cached = jnp.where((places < length)[:, None], cached, 0.0)
        vectors = cached[:, :latent].astype(up.dtype)
        made = jnp.einsum("kl,hdl->hkd", vectors, up, precision=precision, preferred_element_type=jnp.float32)
        rotated = jnp.broadcast_to(cached[:, latent:], (heads, *cached[:, latent:].shape))
        keys, values = jnp.concatenate([made[..., :key_dim], rotated], axis=-1), made[..., key_dim:]
        # The first query at or after the tile's first key.
        first = start + jnp.maximum(number * tile_keys - (length - (end - start)), 0)

        def query_block(block: jax.Array, softmax: Softmax) -> Softmax:
            at = first + block * width
            mine = at + jnp.arange(width)
            positions = length - end + mine
            visible = (places <= positions[:, None]) & (mine < end)[:, None]
            old = jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(each, at, width, axis=1), softmax)
            here = jax.lax.dynamic_slice_in_dim(scaled, at, width, axis=1)
            new = old.add(here, keys, values, visible[None], None)
            put = lambda into, part: jax.lax.dynamic_update_slice_in_dim(into, part, at, axis=1)  # noqa: E731
            return jax.tree.map(put, softmax, new)

        return jax.lax.fori_loop(0, -(-(end - first) // width), query_block, softmax)

    of_all = (heads, tokens + width)
    softmax = Softmax(jnp.full(of_all, MASKED), jnp.zeros(of_all), jnp.zeros((*of_all, value_dim)))
    found = jax.lax.fori_loop(0, tile_ends[-1], tile, softmax).result()
    return found[:, :tokens].swapaxes(0, 1).astype(queries.dtype)
