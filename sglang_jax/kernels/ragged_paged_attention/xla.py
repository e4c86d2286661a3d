"""Attention for XLA on CPU and GPU: online softmax over blocks of keys, as many as the lengths call for.

All trip counts are data, so one program serves all lengths and takes time by the actual ones. Decode rows go
through the blocks together, up to the longest row. Prefill goes query block by query block, each up to its last
query's position. The recurrence is that of FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import gather_kv
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.sequences import Sequences

_KEYS_PER_BLOCK = 128
_QUERIES_PER_BLOCK = 64
_MASKED = -1e30
"""Score of a key that a query must not see: finite, since infinities subtracted from each other are NaN."""


class _Softmax(NamedTuple):
    """A softmax in progress: over the keys so far, the largest score and the sum of exponentials (`[..., q]`), and
    the weighted sum of values (`[..., q, head_dim]`)."""

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array

    @classmethod
    def start(cls, queries: jax.Array, sinks: jax.Array | None) -> _Softmax:
        """Over no keys, or over the sinks alone: `[..., q]` or a shape that broadcasts to it."""
        rows = queries.shape[:-1]
        if sinks is not None:
            return cls(jnp.broadcast_to(sinks, rows), jnp.ones(rows), jnp.zeros(queries.shape))
        return cls(jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros(queries.shape))

    def add(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        visible: jax.Array,
        soft_cap: float | None,
    ) -> _Softmax:
        """Takes in a block of keys: queries `[..., q, d]`, keys and values `[..., k, d]`, visible `[..., q, k]`."""
        scores = jnp.einsum("...qd,...kd->...qk", queries, keys, precision=jax.lax.Precision.HIGHEST)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, _MASKED)
        largest = jnp.maximum(self.largest, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - largest[..., None]), 0.0)
        shrink = jnp.exp(self.largest - largest)
        added = jnp.einsum("...qk,...kd->...qd", weights, values, precision=jax.lax.Precision.HIGHEST)
        return _Softmax(
            largest,
            self.total * shrink + weights.sum(-1),
            self.weighted * shrink[..., None] + added,
        )

    def result(self) -> jax.Array:
        """The attention output; 0 for a query that saw no key."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def xla_attention(
    queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
) -> jax.Array:
    """`ragged_paged_attention` by blocks."""
    tokens, heads, head_dim = queries.shape
    rows, kv_heads = batch.kv_lens.shape[0], kv_pages.shape[1]
    page_table = _whole_blocks(batch.page_table, kv_pages.shape[3])
    scaled = (queries.astype(jnp.float32) * scale).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    decode_lens = jnp.where(jnp.arange(rows) < batch.num_decode, batch.kv_lens, 0)
    output = _decode(scaled[:rows], kv_pages, page_table, decode_lens, options)
    if tokens > rows:
        output = jnp.pad(output, ((0, tokens - rows), (0, 0), (0, 0), (0, 0)))
        output = _prefill(output, scaled, kv_pages, page_table, batch, options)
    return output.reshape(queries.shape).astype(queries.dtype)


def _pages_per_block(page_size: int) -> int:
    return max(_KEYS_PER_BLOCK // page_size, 1)


def _whole_blocks(page_table: jax.Array, page_size: int) -> jax.Array:
    """Widens the table to whole blocks, so that no block's slice is shifted to fit."""
    count = _pages_per_block(page_size)
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))


def _sinks(options: AttentionOptions, kv_heads: int) -> jax.Array | None:
    """`[kv_heads, group]`."""
    return None if options.sinks is None else options.sinks.astype(jnp.float32).reshape(kv_heads, -1)


def _decode(
    queries: jax.Array, kv_pages: jax.Array, page_table: jax.Array, kv_lens: jax.Array, options: AttentionOptions
) -> jax.Array:
    """One query per row, at the row's last position: queries `[R, kv_heads, group, d]`, as is the result."""
    rows, kv_heads, _, head_dim = queries.shape
    page_size = kv_pages.shape[3]
    pages_per_block = _pages_per_block(page_size)
    keys_per_block = pages_per_block * page_size

    def block(index: jax.Array, softmax: _Softmax) -> _Softmax:
        pages = jax.lax.dynamic_slice(page_table, (0, index * pages_per_block), (rows, pages_per_block))
        keys, values = gather_kv(kv_pages, pages, head_dim, options.kv_scales)
        places = index * keys_per_block + jnp.arange(keys_per_block)
        visible = places < kv_lens[:, None]
        if options.window is not None:
            visible &= places >= kv_lens[:, None] - options.window
        values = jnp.where(visible[:, None, :, None], values, 0.0)
        return softmax.add(queries, keys, values, visible[:, None, None, :], options.soft_cap)

    blocks = -(-kv_lens.max() // keys_per_block)
    first = 0
    if options.window is not None:
        starts = jnp.where(kv_lens > 0, jnp.maximum(kv_lens - options.window, 0), jnp.iinfo(jnp.int32).max)
        first = jnp.minimum(starts.min() // keys_per_block, blocks)
    softmax = _Softmax.start(queries, _sinks(options, kv_heads))
    return jax.lax.fori_loop(first, blocks, block, softmax).result()


def _prefill(
    output: jax.Array,
    queries: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    batch: Sequences,
    options: AttentionOptions,
) -> jax.Array:
    """Fills in the output of the sequences that are not decode rows: both `[T, kv_heads, group, d]`."""
    tokens, rows = queries.shape[0], batch.kv_lens.shape[0]
    width = min(_QUERIES_PER_BLOCK, tokens)
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    lengths = jnp.where(jnp.arange(rows) < batch.num_decode, 0, ends - starts)
    block_ends = jnp.cumsum(-(-lengths // width))
    padding = ((0, width), (0, 0), (0, 0), (0, 0))
    queries = jnp.pad(queries, padding)

    def query_block(index: jax.Array, output: jax.Array) -> jax.Array:
        sequence = jnp.searchsorted(block_ends, index, side="right", method="compare_all")
        blocks_left = block_ends[sequence] - index
        blocks = -(-lengths[sequence] // width)
        first = starts[sequence] + (blocks - blocks_left) * width
        places = first + jnp.arange(width)
        positions = batch.kv_lens[sequence] - ends[sequence] + places
        mine = jax.lax.dynamic_slice_in_dim(queries, first, width)
        keys_seen = jnp.minimum(positions[-1] + 1, batch.kv_lens[sequence])
        found = _one_sequence(mine, kv_pages, page_table[sequence], positions, keys_seen, options)
        old = jax.lax.dynamic_slice_in_dim(output, first, width)
        new = jnp.where((places < ends[sequence])[:, None, None, None], found, old)
        return jax.lax.dynamic_update_slice_in_dim(output, new, first, axis=0)

    return jax.lax.fori_loop(0, block_ends[-1], query_block, jnp.pad(output, padding))[:tokens]


def _one_sequence(
    queries: jax.Array,
    kv_pages: jax.Array,
    pages: jax.Array,
    positions: jax.Array,
    keys_seen: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """Queries `[q, kv_heads, group, d]` of one sequence at `positions` `[q]`, over its first `keys_seen` keys."""
    width, kv_heads, group, head_dim = queries.shape
    pages_per_block = _pages_per_block(kv_pages.shape[3])
    keys_per_block = pages_per_block * kv_pages.shape[3]
    packed = queries.swapaxes(0, 1).reshape(kv_heads, width * group, head_dim)

    def block(index: jax.Array, softmax: _Softmax) -> _Softmax:
        mine = jax.lax.dynamic_slice_in_dim(pages, index * pages_per_block, pages_per_block)
        keys, values = gather_kv(kv_pages, mine, head_dim, options.kv_scales)
        places = index * keys_per_block + jnp.arange(keys_per_block)
        values = jnp.where((places < keys_seen)[None, :, None], values, 0.0)
        visible = (places <= positions[:, None]) & (places < keys_seen)
        if options.window is not None:
            visible &= positions[:, None] - places < options.window
        visible = jnp.repeat(visible, group, axis=0)[None]
        return softmax.add(packed, keys, values, visible, options.soft_cap)

    blocks = -(-keys_seen // keys_per_block)
    first = 0 if options.window is None else jnp.maximum(positions[0] - options.window + 1, 0) // keys_per_block
    sinks = _sinks(options, kv_heads)
    softmax = _Softmax.start(packed, None if sinks is None else jnp.tile(sinks, (1, width)))
    found = jax.lax.fori_loop(first, blocks, block, softmax).result()
    return found.reshape(kv_heads, width, group, head_dim).swapaxes(0, 1)
