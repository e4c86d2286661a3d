"""Data-parallel attention: each device computes the attention of its rows, with pages that only it has.

Layers see the tokens of all rows. Attention takes those of each device's rows, and computes them as on one device, with
all heads; the outputs are put back in their places, and a sum over the devices gives every device all of them. So
exchange is as much as that of tensor parallelism, and what is cached is divided, as are the projections of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, plan_writes
from sglang_jax.layers.batch import ForwardBatch, RankBatch, SequenceRanks
from sglang_jax.layers.sharding import PAGES_OF_RANKS, TENSOR, automatic_mesh

_WHOLE = PartitionSpec()


def divide(implementation: AttentionImplementation, batch: ForwardBatch, kv_pages: jax.Array) -> ForwardBatch:
    """The batch with the parts of all ranks, and each rank's plan of its writes into pages like `kv_pages`."""
    mesh, ranks = automatic_mesh(), batch.ranks
    assert mesh is not None, "ranks are devices of a mesh"
    assert ranks is not None

    def part(batch: ForwardBatch, ranks: SequenceRanks) -> RankBatch:
        own = part_of(batch, ranks, jax.lax.axis_index(TENSOR))
        plan = plan_writes(implementation, like_one_rank, own.batch.write_slots)
        own = replace(own, batch=replace(own.batch, write_plan=plan))
        return jax.tree.map(lambda array: array[None], own)

    # Only the shape and the dtype are read.
    like_one_rank = jnp.zeros((1, *kv_pages.shape[1:]), kv_pages.dtype)
    by_rank = PartitionSpec(TENSOR)
    own = jax.shard_map(part, mesh=mesh, in_specs=_WHOLE, out_specs=by_rank, check_vma=False)(batch, ranks)
    return replace(batch, own=own)


def part_of(batch: ForwardBatch, ranks: SequenceRanks, rank: jax.Array) -> RankBatch:
    """The sequences and tokens of one rank, in the order of all, without the axis of ranks."""
    num_tokens, num_rows = len(batch.tokens), len(batch.kv_lens)
    rows = min(num_rows, ranks.rows)
    tokens = rows if num_tokens == num_rows else min(num_tokens, ranks.tokens)
    mine = ranks.of == rank
    (sequences,) = jnp.nonzero(mine, size=rows, fill_value=num_rows)
    real, sequences = sequences < num_rows, jnp.minimum(sequences, num_rows - 1)
    begins = batch.query_starts[sequences]
    counts = jnp.where(real, batch.query_starts[sequences + 1] - begins, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    places = jnp.arange(tokens, dtype=jnp.int32)
    of_token = jnp.minimum(jnp.searchsorted(starts[1:], places, side="right", method="compare_all"), rows - 1)
    there = places < starts[-1]
    at = jnp.where(there, begins[of_token] + places - starts[of_token], num_tokens - 1)
    every = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = batch.query_starts[1:]
    of_all = jnp.minimum(jnp.searchsorted(ends, every, side="right", method="compare_all"), num_rows - 1)
    ours = mine[of_all] & (every < ends[-1])

    def of_tokens(numbers: jax.Array) -> jax.Array:
        return jnp.where(there, numbers[at], 0)

    own = ForwardBatch(
        tokens=of_tokens(batch.tokens),
        positions=of_tokens(batch.positions),
        write_slots=of_tokens(batch.write_slots),
        page_table=jnp.where(real[:, None], batch.page_table[sequences], 0),
        kv_lens=jnp.where(real, batch.kv_lens[sequences], 0),
        query_starts=starts,
        num_decode=(mine & (jnp.arange(num_rows) < batch.num_decode)).sum(dtype=jnp.int32),
    )
    found = jnp.where(ours, jnp.cumsum(ours, dtype=jnp.int32) - 1, tokens)
    return RankBatch(at.astype(jnp.int32), found, own)


def on_each_rank(
    attend: Callable[[object, jax.Array, tuple[jax.Array, ...], jax.Array, ForwardBatch], tuple[jax.Array, jax.Array]],
    weights: object,
    x: jax.Array,
    rotary: tuple[jax.Array, ...],
    kv_pages: jax.Array,
    own: RankBatch,
) -> tuple[jax.Array, jax.Array]:
    """Runs `attend(weights, x, rotary, pages, batch)`, which returns outputs like x and the pages, on each rank with
    the tokens of its rows. `x` `[T, hidden]`, `rotary` `[T, ...]` each: of all tokens. Returns the outputs of all."""
    mesh = automatic_mesh()
    assert mesh is not None, "ranks are devices of a mesh"

    def run(
        weights: object, x: jax.Array, rotary: tuple[jax.Array, ...], kv_pages: jax.Array, own: RankBatch
    ) -> tuple[jax.Array, jax.Array]:
        own = jax.tree.map(lambda array: array[0], own)
        tables = tuple(table[own.tokens] for table in rotary)
        mine, kv_pages = attend(weights, x[own.tokens], tables, kv_pages, own.batch)
        ours = own.places < len(mine)
        placed = jnp.where(ours[:, None], mine[jnp.minimum(own.places, len(mine) - 1)], 0)
        return jax.lax.psum(placed, TENSOR), kv_pages

    by_rank = PartitionSpec(TENSOR)
    specs = (_WHOLE, _WHOLE, _WHOLE, PAGES_OF_RANKS, by_rank)
    divided = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(_WHOLE, PAGES_OF_RANKS), check_vma=False)
    return divided(weights, x, rotary, kv_pages, own)
