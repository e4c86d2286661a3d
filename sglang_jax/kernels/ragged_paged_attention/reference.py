"""The oracle of attention, in plain jnp: each token reads every slot of its sequence's page-table row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import gather_kv
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences


def reference_attention(
    queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
) -> jax.Array:
    """`ragged_paged_attention` at a cost of `T` times the page table's columns, whatever the lengths."""
    tokens, heads, head_dim = queries.shape
    kv_heads = kv_pages.shape[1]
    places = jnp.arange(tokens)
    ends = batch.query_starts[1:]
    real = places < batch.query_starts[-1]
    sequences = jnp.where(real, jnp.searchsorted(ends, places, side="right"), 0)
    behind = ends[sequences] - places if options.causal else 1
    positions = (batch.kv_lens[sequences] - behind)[:, None]

    pages = batch.page_table[sequences]
    keys, values = gather_kv(kv_pages, pages, head_dim, options.kv_scales, options.value_dim)  # [T, kv_heads, slots, d]
    grouped = queries.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    slots = jnp.arange(keys.shape[2])
    visible = real[:, None] & (slots <= positions)
    if options.window is not None:
        visible &= positions - slots < options.window
    scores = jnp.einsum("thgd,thsd->thgs", grouped, keys, precision=jax.lax.Precision.HIGHEST) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    if options.sinks is not None:
        sinks = options.sinks.astype(jnp.float32).reshape(1, *grouped.shape[1:3], 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*grouped.shape[:3], 1))], axis=-1)
    weights = jnp.where(real[:, None, None, None], jax.nn.softmax(scores, axis=-1), 0.0)[..., : slots.size]
    values = jnp.where(visible[:, None, :, None], values, 0.0)
    output = jnp.einsum("thgs,thsd->thgd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return output.reshape(tokens, heads, -1).astype(queries.dtype)
