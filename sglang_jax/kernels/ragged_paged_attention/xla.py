"""Attention for XLA on CPU and GPU: online softmax over blocks of keys, as many as the lengths call for.

All trip counts are data, so one program serves all lengths and takes time by the actual ones. Decode rows go
through the blocks together, up to the longest row. Prefill goes query block by query block, each up to its last
query's position: through large blocks where every query sees every key, through small ones with a mask elsewhere. The
recurrence is that of FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import gather_kv
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences

_DECODE_KEYS = 128
_QUERIES_PER_BLOCK = 64
_MASKED_KEYS = 64
_LARGE_BLOCK = 4
"""Small blocks in a large one. Whole steps of 512 tokens of SmolLM2-135M on 2 cores, in milliseconds, without large
blocks but with all of 64 / 128 / 256 keys: eight prompts of 64 tokens 174 / 201 / 337; 512 tokens behind 1,536 others
1,036 / 1,003 / 804."""
_FEW_QUERIES = 4
"""This many times fewer than keys."""
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
        visible: jax.Array | None,
        soft_cap: float | None,
    ) -> _Softmax:
        """Takes in a block of keys: queries `[..., q, d]`, keys and values `[..., k, d]`, visible `[..., q, k]`, or
        None if every query sees every key."""
        scores = _products(queries, keys)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        largest = jnp.maximum(self.largest, scores.max(-1))
        weights = jnp.exp(scores - largest[..., None])
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
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


def _products(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """`[..., q, k]` of queries `[..., q, d]` and keys `[..., k, d]`.

    XLA's CPU backend packs the right side first. Of few queries that is to be theirs, or packing takes longer than the
    product (of 32 decode rows with 3 queries to a kv head, 20 ms of attention in place of 26).
    """
    if queries.shape[-2] * _FEW_QUERIES > keys.shape[-2]:
        return jnp.einsum("...qd,...kd->...qk", queries, keys, precision=jax.lax.Precision.HIGHEST)
    products = jnp.einsum("...kd,...qd->...kq", keys, queries, precision=jax.lax.Precision.HIGHEST)
    # Without the barrier the compiler takes away the transposition, and exchanges the sides for it.
    return jax.lax.optimization_barrier(products).swapaxes(-1, -2)


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


def _pages(keys: int, page_size: int) -> int:
    """Of a block of about so many keys."""
    return max(keys // page_size, 1)


def _whole_blocks(page_table: jax.Array, page_size: int) -> jax.Array:
    """Widens the table to whole blocks of either kind, so that no block's slice is shifted to fit."""
    count = math.lcm(_pages(_DECODE_KEYS, page_size), _pages(_MASKED_KEYS, page_size))
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
    pages_per_block = _pages(_DECODE_KEYS, page_size)
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
    pages_per_block = _pages(_MASKED_KEYS, kv_pages.shape[3])
    keys_per_block = pages_per_block * kv_pages.shape[3]
    large_block = min(_LARGE_BLOCK, pages.shape[0] // pages_per_block)
    packed = queries.swapaxes(0, 1).reshape(kv_heads, width * group, head_dim)

    def gather(index: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
        mine = jax.lax.dynamic_slice_in_dim(pages, index * pages_per_block, blocks * pages_per_block)
        return gather_kv(kv_pages, mine, head_dim, options.kv_scales)

    def masked(index: jax.Array, softmax: _Softmax) -> _Softmax:
        keys, values = gather(index, 1)
        places = index * keys_per_block + jnp.arange(keys_per_block)
        seen = places < keys_seen
        visible = (places <= positions[:, None]) & seen
        if options.window is not None:
            visible &= positions[:, None] - places < options.window
            # Pages before the window of every query may be anybody's, and hold what is not finite.
            seen &= positions[0] - places < options.window
        values = jnp.where(seen[None, :, None], values, 0.0)
        visible = jnp.repeat(visible, group, axis=0)[None]
        return softmax.add(packed, keys, values, visible, options.soft_cap)

    def large(number: jax.Array, softmax: _Softmax) -> _Softmax:
        keys, values = gather(whole.start + number * large_block, large_block)
        return softmax.add(packed, keys, values, None, options.soft_cap)

    sinks = _sinks(options, kv_heads)
    softmax = _Softmax.start(packed, None if sinks is None else jnp.tile(sinks, (1, width)))
    blocks = -(-keys_seen // keys_per_block)
    whole = _WholeBlocks.of(positions, keys_per_block, large_block, options.window)
    if options.window is not None:
        oldest = jnp.maximum(positions[0] - options.window + 1, 0) // keys_per_block
        softmax = jax.lax.fori_loop(oldest, jnp.minimum(whole.start, blocks), masked, softmax)
    softmax = jax.lax.fori_loop(0, whole.count, large, softmax)
    softmax = jax.lax.fori_loop(whole.start + whole.count * large_block, blocks, masked, softmax)
    return softmax.result().reshape(kv_heads, width, group, head_dim).swapaxes(0, 1)


class _WholeBlocks(NamedTuple):
    """Of a query block: the first small block of which each query sees every key, and how many large ones are such from
    there on."""

    start: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, positions: jax.Array, keys_per_block: int, large_block: int, window: int | None) -> _WholeBlocks:
        """Of queries at ascending `positions` `[q]`; a large block is `large_block` small ones of `keys_per_block`."""
        start = jnp.zeros((), positions.dtype)
        if window is not None:
            start = -(-jnp.maximum(positions[-1] - window + 1, 0) // keys_per_block)
        end = (positions[0] + 1) // keys_per_block
        return cls(start, jnp.maximum(end - start, 0) // large_block)
