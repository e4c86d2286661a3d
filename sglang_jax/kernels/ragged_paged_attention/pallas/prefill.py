"""Attention of prefill chunks: a whole block of queries uses each block of keys.

A block of queries has consecutive tokens, perhaps of several chunks. A program takes one block and processes its chunks
in order, each over the keys that its queries in the block may see; queries of other chunks are masked. The pages of the
next block of keys, of this chunk, the next one or the next program, are fetched meanwhile. Queries are stored by head,
so that a tile holds one head of all the block's tokens. Blocks of keys that all queries see entirely are multiplied
without masks, those of a short chunk only by the run of queries that contains it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas.pages import PageFetcher, Ref, Scalar
from sglang_jax.kernels.ragged_paged_attention.pallas.softmax import (
    LANES,
    MASKED,
    OUTPUT_FACTOR,
    SCORE_UNIT,
    SINK,
    SOFT_CAP_FACTOR,
    StaticOptions,
    constants_per_head,
    finish_softmax,
    lanes_of_values,
    lanewise,
    largest_of_rows,
    matmul,
    matmul_nt,
    static_options,
    sum_of_lane_tiles,
    type_of_products,
)
from sglang_jax.kernels.ragged_paged_attention.pallas.spans import Cursor, Span, Walk

ROWS_TOGETHER = 128
"""A chunk within an aligned run of this many queries is computed only for the run."""

_ROWS_OF_A_PRODUCT = 256
"""Heads of one kv head share products of up to this many rows, if a block has fewer queries: keys are loaded into the
matrix units once for all of them."""

HEADS_TOGETHER = 4
"""Heads, or groups of heads that share products, per iteration of the loop over them, an even number. One head's
latencies are filled by the others: with two heads an iteration, each took 10 to 14 % more bundles."""


@dataclass(frozen=True, slots=True)
class PrefillBlocks:
    """Queries per program and pages per block of keys."""

    queries: int
    pages: int


def heads_of_a_product(heads: int, kv_heads: int, queries: int) -> int:
    """The number of heads that share products, in blocks of `queries` queries."""
    most = max(_ROWS_OF_A_PRODUCT // queries, 1)
    return math.gcd(heads // kv_heads, 1 << (most.bit_length() - 1))


def prefill_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    options: AttentionOptions,
    blocks: PrefillBlocks,
    vmem_limit: int,
    cores: int = 1,
    checked: bool = False,
    fixed: bool = False,
) -> jax.Array:
    """Attention of all sequences except the first `num_decode`, `[heads, T, lanes_of_values]` in the type of the
    queries; 0 for tokens of other sequences and padding.

    `queries` `[heads, T, lanes]`, T a multiple of `blocks.queries * cores`; `kv_pages` `[num_pages, kv_heads, parts,
    page_size, lanes]`; `page_table` int32 `[R, 1, columns]`; `kv_lens` int32 `[R]`; `query_starts` int32 `[R + 1]`;
    `num_decode` int32 `[1]`; `cores`: the number of cores that share the work, each with consecutive blocks; `checked`:
    compile address checks in; `fixed`: blocks of keys are at fixed places of a sequence.
    """
    heads, tokens, lanes = queries.shape
    _, kv_heads, parts, page_size, _ = kv_pages.shape
    columns = page_table.shape[2]
    of_a_core = tokens // blocks.queries // cores
    rows_at_once = blocks.queries * heads_of_a_product(heads, kv_heads, blocks.queries)
    value_lanes = lanes_of_values(lanes, options)
    inputs, outputs = (
        pl.BlockSpec((heads, blocks.queries, size), lambda core, step, *_: (0, core * of_a_core + step, 0))
        for size in (lanes, value_lanes)
    )
    return pl.pallas_call(
        functools.partial(_kernel, options=static_options(options), fixed=fixed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, of_a_core),
            in_specs=[inputs, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=outputs,
            scratch_shapes=[
                pltpu.VMEM((2, blocks.pages, kv_heads, parts, page_size, lanes), kv_pages.dtype),
                pltpu.VMEM((heads, blocks.queries, LANES), jnp.float32),
                pltpu.VMEM((heads, blocks.queries, LANES), jnp.float32),
                pltpu.VMEM((heads, blocks.queries, value_lanes), jnp.float32),
                pltpu.VMEM((2, rows_at_once, blocks.pages * page_size), jnp.float32),
                pltpu.VMEM((2, rows_at_once, LANES), jnp.float32),
                pltpu.SMEM((2 * columns,), jnp.int32),
                pltpu.SMEM((Cursor.SIZE,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((heads, tokens, value_lanes), queries.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=not checked,
        ),
        name="paged_attention_prefill",
    )(
        kv_lens,
        query_starts,
        num_decode,
        constants_per_head(heads, kv_heads, scale, options)[:, :, 0],
        queries.astype(type_of_products(kv_pages.dtype)),
        page_table,
        kv_pages,
    )


def _kernel(
    kv_lens: Ref,  # SMEM [R]
    query_starts: Ref,  # SMEM [R + 1]
    num_decode: Ref,  # SMEM [1]
    per_head: Ref,  # SMEM [4, heads]
    queries: Ref,  # VMEM [heads, block, lanes]
    page_table: Ref,  # HBM [R, 1, columns]
    kv_pages: Ref,  # HBM [num_pages, kv_heads, parts, page_size, lanes]
    output: Ref,  # VMEM [heads, block, lanes of values]
    buffers: Ref,
    largest: Ref,  # VMEM [heads, block, 128], as are the totals
    total: Ref,
    weighted: Ref,  # VMEM [heads, block, lanes of values]
    scores: Ref,  # VMEM [2, rows, keys]: of two heads, or groups of heads that share products
    row_largest: Ref,  # VMEM [2, rows, 128]
    page_numbers: Ref,
    state: Ref,  # SMEM [Cursor.SIZE]: between programs
    kv_arrived: Ref,
    numbers_arrived: Ref,
    *,
    options: StaticOptions,
    fixed: bool,
) -> None:
    fetcher = PageFetcher(kv_pages, page_table, buffers, page_numbers, kv_arrived, numbers_arrived)
    heads, width, _ = queries.shape
    core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    last_place = (core + 1) * steps * width
    walk = Walk(fetcher, kv_lens, query_starts, num_decode, width, options.window, last_place, fixed)
    sums = _Sums(largest, total, weighted, scores, row_largest)
    first_place = (core * steps + step) * width

    @pl.when(step == 0)
    def _() -> None:
        walk.begin(first_place).store(state)

    @pl.loop(0, heads)
    def _(head: jax.Array) -> None:
        first = per_head[SINK, head] if options.sinks else MASKED
        largest[head] = jnp.full((width, LANES), first, jnp.float32)
        total[head] = jnp.full((width, LANES), 1 / LANES if options.sinks else 0.0, jnp.float32)
        weighted[head] = jnp.zeros((width, output.shape[2]), jnp.float32)

    def attend(span: Span, origin: Scalar, slot: Scalar) -> None:
        keys = fetcher.pages_per_block * fetcher.page_size
        end = span.last + span.shift - origin

        @pl.when(end < keys)
        def _() -> None:
            fetcher.clear_values_from(end, slot, fetcher.pages_per_block)

        if fixed and options.window is not None:
            # The first block has room for pages before the window, which are not fetched.
            begin = span.first_page - origin // fetcher.page_size
            fetcher.clear_pages_of_values(slot, 0, begin)

        add = functools.partial(_add_block, queries, per_head, buffers, slot, sums, options)
        _by_form(add, span, origin, first_place, width, keys, options)

    walk.through_block(Cursor.load(state), first_place + width, attend).store(state)

    place = first_place + jax.lax.broadcasted_iota(jnp.int32, (width, 1), 0)
    real = (place >= query_starts[num_decode[0]]) & (place < walk.tokens)

    @pl.loop(0, heads)
    def _(head: jax.Array) -> None:
        factor = jnp.full((width, LANES), per_head[OUTPUT_FACTOR, head])
        found = finish_softmax(total[head], weighted[head], factor)
        output[head] = jnp.where(real, found, 0.0).astype(output.dtype)


def _by_form(
    add: Callable[[int, int, jax.Array | None], None],
    span: Span,
    origin: Scalar,
    first_place: Scalar,
    width: int,
    keys: int,
    options: StaticOptions,
) -> None:
    """Calls `_add_block` in the cheapest form for a block of `keys` keys from position `origin` on: without masks, for
    the run of queries that contains the span, or for all queries."""
    whole = (span.first == first_place) & (span.last == first_place + width)
    whole &= origin + keys - 1 <= span.first + span.shift
    if options.window is not None:
        whole &= origin > span.last - 1 + span.shift - options.window
    run = min(width, ROWS_TOGETHER)
    first_run = (span.first - first_place) // run
    in_one_run = (span.last - 1 - first_place) // run == first_run

    def add_masked(first_row: int, rows: int) -> None:
        place = first_place + first_row + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        mine = (place >= span.first) & (place < span.last)
        add(first_row, rows, jnp.where(mine, place + span.shift - origin, -1))

    pl.when(whole)(functools.partial(add, 0, width, None))
    for index in range(width // run):
        condition = in_one_run & (first_run == index) & jnp.logical_not(whole)
        pl.when(condition)(functools.partial(add_masked, index * run, run))
    if run < width:
        pl.when(jnp.logical_not(in_one_run | whole))(functools.partial(add_masked, 0, width))


@dataclass(frozen=True)
class _Sums:
    """The softmax of all heads and the scores of the current heads, in the memory that `_kernel` describes."""

    largest: Ref
    total: Ref
    weighted: Ref
    scores: Ref
    row_largest: Ref


def _add_block(
    queries: Ref,
    per_head: Ref,
    buffers: Ref,
    slot: Scalar,
    sums: _Sums,
    options: StaticOptions,
    first_row: int,
    num_rows: int,
    last_seen: jax.Array | None,
) -> None:
    """Adds a block of keys to the softmax of some of the block's queries, for every head. `last_seen` int32 `[num_rows,
    1]`: the last slot of the block that a query sees, negative if none; None if all queries see all slots.

    Heads are computed in groups that share products (`heads_of_a_product`). The scores of one group are computed during
    the softmax of the group before it, so that matrix and vector units work at the same time. Two buffers for scores
    alternate, at addresses that are static for the compiler.
    """
    heads, _, lanes = queries.shape
    _, _, kv_heads, parts, _, _ = buffers.shape
    together = sums.scores.shape[1] // queries.shape[1]
    groups, rows = heads // together, together * num_rows
    if last_seen is not None:
        last_seen = jnp.concatenate([last_seen] * together, axis=0)

    def of_group(group: Scalar) -> tuple[Any, Any]:
        """The index of a group's queries in an array by heads."""
        return pl.ds(group * together, together), pl.ds(first_row, num_rows)

    def load(array: Ref, group: Scalar) -> jax.Array:
        return array[of_group(group)].reshape(rows, array.shape[2])

    def store(array: Ref, group: Scalar, found: jax.Array) -> None:
        array[of_group(group)] = found.reshape(together, num_rows, array.shape[2])

    def side(group: Scalar, part: int, lanes: int) -> jax.Array:
        found = buffers[slot, :, group // (groups // kv_heads), part, :, :lanes]
        return found.reshape(-1, lanes).astype(queries.dtype)

    def score(group: Scalar, turn: int) -> None:
        found = matmul_nt(load(queries, group), side(group, 0, lanes))
        if options.soft_cap is not None:
            found = options.soft_cap * jnp.tanh(found * per_head[SOFT_CAP_FACTOR, group * together])
        if last_seen is not None:
            place = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
            visible = place <= last_seen
            if options.window is not None:
                visible &= place > last_seen - options.window
            found = jnp.where(visible, found, MASKED)
        sums.scores[turn, :rows] = found
        sums.row_largest[turn, :rows] = jnp.broadcast_to(largest_of_rows(found), (rows, LANES))

    def add(group: Scalar, turn: int) -> None:
        unit = per_head[SCORE_UNIT, group * together]
        old = load(sums.largest, group)
        new = jnp.maximum(old, sums.row_largest[turn, :rows])
        weights = lanewise(lambda tile: jnp.exp2((tile - new) * unit), sums.scores[turn, :rows])
        shrink = jnp.exp2((old - new) * unit)
        added = matmul(weights.astype(queries.dtype), side(group, parts - 1, sums.weighted.shape[2]))
        store(sums.largest, group, new)
        store(sums.total, group, load(sums.total, group) * shrink + sum_of_lane_tiles(weights))
        store(sums.weighted, group, lanewise(jnp.multiply, load(sums.weighted, group), shrink) + added)

    def add_and_score_next(group: Scalar, member: int) -> None:
        score(jnp.minimum(group + 1, groups - 1), (member + 1) % 2)
        add(group, member % 2)

    score(0, 0)

    @pl.loop(0, groups // HEADS_TOGETHER)
    def _(iteration: jax.Array) -> None:
        for member in range(HEADS_TOGETHER):
            add_and_score_next(iteration * HEADS_TOGETHER + member, member)

    for group in range(groups // HEADS_TOGETHER * HEADS_TOGETHER, groups):
        add_and_score_next(group, group % HEADS_TOGETHER)
