"""Attention for XLA on CPU and GPU: an online softmax (FlashAttention, Dao et al. 2022) over blocks of keys. Trip
counts are data, so that one program serves all lengths and takes time for the actual ones. Decode rows process blocks
together, up to the longest row. Prefill takes one block of queries at a time, up to its last query's position: large
blocks of keys if every query sees every key, small ones with a mask otherwise."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import gather_kv
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences
from sglang_jax.kernels.ragged_paged_attention.softmax import Softmax

_DECODE_KEYS = 128
_QUERIES_PER_BLOCK = 64
_FIXED_QUERIES = 16
_MASKED_KEYS = 64
_LARGE_BLOCK = 4
"""Small blocks per large one. Both sizes are needed: a step of 512 tokens of SmolLM2-135M on 2 cores, with only blocks
of 64 / 128 / 256 keys, takes 174 / 201 / 337 ms for eight prompts of 64 tokens and 1,036 / 1,003 / 804 ms for 512
tokens after 1,536 others."""


def xla_attention(
    queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
) -> jax.Array:
    tokens, rows = len(queries), len(batch.kv_lens)
    page_table = _whole_blocks(batch.page_table, kv_pages.shape[3])
    scaled = _scaled(queries, kv_pages, scale)
    decode_lens = jnp.where(jnp.arange(rows) < batch.num_decode, batch.kv_lens, 0)
    output = _decode(scaled[:rows], kv_pages, page_table, decode_lens, options)
    if tokens > rows:
        output = jnp.pad(output, ((0, tokens - rows), (0, 0), (0, 0), (0, 0)))
        output = _prefill(output, scaled, kv_pages, page_table, batch, options)
    return output.reshape(*queries.shape[:2], -1).astype(queries.dtype)


def xla_prompts(
    output: jax.Array,
    queries: jax.Array,
    kv_pages: jax.Array,
    batch: Sequences,
    *,
    scale: float,
    options: AttentionOptions,
) -> jax.Array:
    """`xla_attention` of the sequences that are not decode rows, added to the float32 `output` of these, `[T, heads,
    value_dim]`."""
    page_table = _whole_blocks(batch.page_table, kv_pages.shape[3])
    scaled = _scaled(queries, kv_pages, scale)
    others = output.reshape(*scaled.shape[:3], -1)
    return _prefill(others, scaled, kv_pages, page_table, batch, options).reshape(output.shape)


def xla_attention_in_fixed_blocks(
    queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
) -> jax.Array:
    """`xla_attention` of every sequence as a chunk, in blocks of one number of queries and of keys: a token's result is
    the same bits in any chunk, and if it is decoded."""
    page_table = _whole_blocks(batch.page_table, kv_pages.shape[3])
    scaled = _scaled(queries, kv_pages, scale)
    empty = jnp.zeros((*scaled.shape[:3], options.value_dim or scaled.shape[3]), scaled.dtype)
    output = _prefill(empty, scaled, kv_pages, page_table, batch, options, fixed=True)
    return output.reshape(*queries.shape[:2], -1).astype(queries.dtype)


def _scaled(queries: jax.Array, kv_pages: jax.Array, scale: float) -> jax.Array:
    """float32 `[T, kv_heads, group, head_dim]`."""
    tokens, _, head_dim = queries.shape
    return (queries.astype(jnp.float32) * scale).reshape(tokens, kv_pages.shape[1], -1, head_dim)


def _pages(keys: int, page_size: int) -> int:
    return max(keys // page_size, 1)


def _whole_blocks(page_table: jax.Array, page_size: int) -> jax.Array:
    """Pads the table to whole small and large blocks, because a slice past its end would be shifted."""
    count = math.lcm(_pages(_DECODE_KEYS, page_size), _pages(_MASKED_KEYS, page_size))
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))


def _sinks(options: AttentionOptions, kv_heads: int) -> jax.Array | None:
    return None if options.sinks is None else options.sinks.astype(jnp.float32).reshape(kv_heads, -1)


def _decode(
    queries: jax.Array, kv_pages: jax.Array, page_table: jax.Array, kv_lens: jax.Array, options: AttentionOptions
) -> jax.Array:
    """Attention of one query per row at its last position, `[R, kv_heads, group, value_dim]`."""
    rows, kv_heads, _, head_dim = queries.shape
    page_size = kv_pages.shape[3]
    pages_per_block = _pages(_DECODE_KEYS, page_size)
    keys_per_block = pages_per_block * page_size

    def block(index: jax.Array, softmax: Softmax) -> Softmax:
        pages = jax.lax.dynamic_slice(page_table, (0, index * pages_per_block), (rows, pages_per_block))
        keys, values = gather_kv(kv_pages, pages, head_dim, options.kv_scales, options.value_dim)
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
    softmax = Softmax.start(queries.shape[:-1], options.value_dim or head_dim, _sinks(options, kv_heads))
    return jax.lax.fori_loop(first, blocks, block, softmax).result()


def _prefill(
    output: jax.Array,
    queries: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    batch: Sequences,
    options: AttentionOptions,
    *,
    fixed: bool = False,
) -> jax.Array:
    """Adds the sequences that are not decode rows to `output` `[T, kv_heads, group, value_dim]`; queries are `[T,
    kv_heads, group, d]`. With `fixed`, all sequences, in blocks of one shape."""
    tokens, rows = queries.shape[0], batch.kv_lens.shape[0]
    width = _FIXED_QUERIES if fixed else min(_QUERIES_PER_BLOCK, tokens)
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    lengths = ends - starts if fixed else jnp.where(jnp.arange(rows) < batch.num_decode, 0, ends - starts)
    if options.unread is not None:
        lengths = jnp.where(options.unread, 0, lengths)
    block_ends = jnp.cumsum(-(-lengths // width))
    padding = ((0, width), (0, 0), (0, 0), (0, 0))
    queries = jnp.pad(queries, padding)

    def query_block(index: jax.Array, output: jax.Array) -> jax.Array:
        sequence = jnp.searchsorted(block_ends, index, side="right", method="compare_all")
        blocks_left = block_ends[sequence] - index
        blocks = -(-lengths[sequence] // width)
        first = starts[sequence] + (blocks - blocks_left) * width
        places = first + jnp.arange(width)
        if options.causal:
            positions = batch.kv_lens[sequence] - ends[sequence] + places
        else:
            positions = jnp.full_like(places, batch.kv_lens[sequence] - 1)
        mine = jax.lax.dynamic_slice_in_dim(queries, first, width)
        keys_seen = jnp.minimum(positions[-1] + 1, batch.kv_lens[sequence])
        found = _one_sequence(mine, kv_pages, page_table[sequence], positions, keys_seen, options, fixed=fixed)
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
    *,
    fixed: bool,
) -> jax.Array:
    """Attention of queries `[q, kv_heads, group, d]` of one sequence at `positions` `[q]` over its first `keys_seen`
    keys."""
    width, kv_heads, group, head_dim = queries.shape
    pages_per_block = _pages(_MASKED_KEYS, kv_pages.shape[3])
    keys_per_block = pages_per_block * kv_pages.shape[3]
    large_block = min(_LARGE_BLOCK, pages.shape[0] // pages_per_block)
    packed = queries.swapaxes(0, 1).reshape(kv_heads, width * group, head_dim)

    def gather(index: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
        mine = jax.lax.dynamic_slice_in_dim(pages, index * pages_per_block, blocks * pages_per_block)
        return gather_kv(kv_pages, mine, head_dim, options.kv_scales, options.value_dim)

    def masked(index: jax.Array, softmax: Softmax) -> Softmax:
        keys, values = gather(index, 1)
        places = index * keys_per_block + jnp.arange(keys_per_block)
        seen = places < keys_seen
        visible = (places <= positions[:, None]) & seen
        if options.window is not None:
            visible &= positions[:, None] - places < options.window
            # Pages before every query's window may belong to other sequences and hold values that are not finite.
            seen &= positions[0] - places < options.window
        values = jnp.where(seen[None, :, None], values, 0.0)
        visible = jnp.repeat(visible, group, axis=0)[None]
        return softmax.add(packed, keys, values, visible, options.soft_cap)

    def large(number: jax.Array, softmax: Softmax) -> Softmax:
        keys, values = gather(whole.start + number * large_block, large_block)
        return softmax.add(packed, keys, values, None, options.soft_cap)

    sinks = _sinks(options, kv_heads)
    value_dim = options.value_dim or head_dim
    rows = None if sinks is None else jnp.tile(sinks, (1, width))
    softmax = Softmax.start(packed.shape[:-1], value_dim, rows)
    blocks = -(-keys_seen // keys_per_block)
    if fixed:
        oldest = 0 if options.window is None else jnp.maximum(positions[0] - options.window + 1, 0) // keys_per_block
        softmax = jax.lax.fori_loop(oldest, blocks, masked, softmax)
        return softmax.result().reshape(kv_heads, width, group, value_dim).swapaxes(0, 1)
    whole = _WholeBlocks.of(positions, keys_per_block, large_block, options.window)
    if options.window is not None:
        oldest = jnp.maximum(positions[0] - options.window + 1, 0) // keys_per_block
        softmax = jax.lax.fori_loop(oldest, jnp.minimum(whole.start, blocks), masked, softmax)
    softmax = jax.lax.fori_loop(0, whole.count, large, softmax)
    softmax = jax.lax.fori_loop(whole.start + whole.count * large_block, blocks, masked, softmax)
    return softmax.result().reshape(kv_heads, width, group, value_dim).swapaxes(0, 1)


class _WholeBlocks(NamedTuple):
    """For a block of queries: the first small block whose keys all queries see, and the number of such large blocks
    from there on."""

    start: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, positions: jax.Array, keys_per_block: int, large_block: int, window: int | None) -> _WholeBlocks:
        """For queries at ascending `positions` `[q]`. A large block is `large_block` small ones of `keys_per_block`
        keys."""
        start = jnp.zeros((), positions.dtype)
        if window is not None:
            start = -(-jnp.maximum(positions[-1] - window + 1, 0) // keys_per_block)
        end = (positions[0] + 1) // keys_per_block
        return cls(start, jnp.maximum(end - start, 0) // large_block)
