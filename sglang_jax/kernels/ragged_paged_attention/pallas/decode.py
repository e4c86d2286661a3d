"""Attention of decode rows, one query each: bound by the bandwidth of keys and values.

A core processes rows in order, each in blocks of keys. All buffers but one receive the pages of the next blocks, of
this row or of later rows: a block of one kv head has a few hundred KiB, which take less time to transfer than the
latency of a copy. Of a row's last block, only as many quarters are computed as have keys. Short rows share blocks
(`decode_walk`).

All query heads of a row go through the matrix units together: row r of the left operand holds query head r in the lanes
of its kv head and zeros elsewhere, so that one product with the keys of all kv heads, side by side, gives `[heads,
keys]` scores in whole registers. The zeros cost nothing: with so few rows, loading keys into the unit takes all the
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks, Sizes, runs_of, sizes_of
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_walk import Plan, Row, Walk
from sglang_jax.kernels.ragged_paged_attention.pallas.pages import PageFetcher, Ref
from sglang_jax.kernels.ragged_paged_attention.pallas.softmax import (
    LANES,
    MASKED,
    OUTPUT_FACTOR,
    SCORE_UNIT,
    SOFT_CAP_FACTOR,
    Softmax,
    StaticOptions,
    constants_per_head,
    finish_softmax,
    lanes_of_values,
    lanewise,
    largest_of_rows,
    matmul,
    matmul_nt,
    start_softmax,
    static_options,
    sum_of_lane_tiles,
    type_of_products,
)


def decode_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    options: AttentionOptions,
    blocks: DecodeBlocks,
    vmem_limit: int,
    cores: int = 1,
    checked: bool = False,
) -> jax.Array:
    """Attention of the first `num_decode` rows, `[R, heads, lanes_of_values]` in the type of the queries; 0 for the
    other rows.

    `queries` `[R, heads, lanes]`, R a multiple of `blocks.rows * cores`; `kv_pages` `[num_pages, kv_heads, parts,
    page_size, lanes]`; `page_table` int32 `[R, columns]`; `kv_lens` int32 `[R]` or shorter; `num_decode` int32 `[1]`;
    `cores`: the number of cores that share the programs; `checked`: compile address checks in.
    """
    rows, heads, lanes = queries.shape
    _, kv_heads, parts, page_size, _ = kv_pages.shape
    columns = page_table.shape[1]
    per_head = constants_per_head(heads, kv_heads, scale, options)
    value_lanes = lanes_of_values(lanes, options)
    inputs, outputs = (
        pl.BlockSpec((blocks.rows, heads, size), lambda core, step, *_: (step * cores + core, 0, 0))
        for size in (lanes, value_lanes)
    )
    compute_dtype = type_of_products(kv_pages.dtype)
    page_bytes = kv_heads * parts * page_size * lanes * kv_pages.dtype.itemsize
    sizes = sizes_of(blocks, page_size, page_bytes, columns, vmem_limit)
    depth, together = sizes.depth, sizes.groups.rows
    plan = Plan.of(
        kv_lens,
        num_decode,
        rows=rows,
        together=together,
        pages_of_short=sizes.groups.pages,
        page_size=page_size,
        window=options.window,
    )
    return pl.pallas_call(
        functools.partial(
            _kernel,
            jax.tree.structure(plan),
            options=static_options(options),
            cores=cores,
            sizes=sizes,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(jax.tree.leaves(plan)),
            grid=(cores, rows // blocks.rows // cores),
            in_specs=[
                inputs,
                pl.BlockSpec(per_head.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=outputs,
            scratch_shapes=[
                pltpu.VMEM((depth, sizes.pages_per_buffer, kv_heads, parts, page_size, lanes), kv_pages.dtype),
                pltpu.VMEM((heads, kv_heads * lanes), compute_dtype),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, value_lanes), jnp.float32),
                pltpu.SMEM((depth * together * columns + LANES,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SMEM((Walk.AHEAD,), jnp.int32),
                pltpu.SemaphoreType.DMA((depth,)),
                pltpu.SemaphoreType.DMA((depth,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, heads, value_lanes), queries.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=not checked,
        ),
        name="paged_attention_decode",
    )(
        *jax.tree.leaves(plan),
        num_decode,
        queries.astype(compute_dtype),
        per_head,
        page_table.reshape(rows // together, 1, together * columns),
        kv_pages,
    )


def _kernel(
    structure: jax.tree_util.PyTreeDef,
    *refs: Ref,
    options: StaticOptions,
    cores: int,
    sizes: Sizes,
) -> None:
    of_plan = structure.num_leaves
    plan = jax.tree.unflatten(structure, refs[:of_plan])
    _compute(plan, *refs[of_plan:], options=options, cores=cores, sizes=sizes)


def _compute(
    plan: Plan,
    num_decode: Ref,  # SMEM [1]
    queries: Ref,  # VMEM [rows, heads, lanes]
    per_head: Ref,  # VMEM [4, heads, 128]
    page_table: Ref,  # HBM [R / together, 1, together * columns]
    kv_pages: Ref,  # HBM [num_pages, kv_heads, parts, page_size, lanes]
    output: Ref,  # VMEM [rows, heads, lanes of values]
    buffers: Ref,
    spread_queries: Ref,  # VMEM [heads, kv_heads * lanes]
    largest: Ref,  # VMEM [heads, 128], as is the total
    total: Ref,
    weighted: Ref,  # VMEM [heads, lanes of values]
    page_numbers: Ref,
    next_slot: Ref,  # SMEM [1]: the buffer of the block that comes next
    ahead: Ref,  # SMEM [Walk.AHEAD]: the block whose copies are started next
    kv_arrived: Ref,
    numbers_arrived: Ref,
    *,
    options: StaticOptions,
    cores: int,
    sizes: Sizes,
) -> None:
    groups, together = sizes.groups, sizes.groups.rows
    fetcher = PageFetcher(kv_pages, page_table, buffers, page_numbers, kv_arrived, numbers_arrived)
    rows, core, step = queries.shape[0], pl.program_id(0), pl.program_id(1)
    walk = Walk(fetcher, plan, num_decode[0], ahead, core, cores, rows, groups, sizes.computed[0])
    sums = _Sums(largest, total, weighted)
    first_row = (step * cores + core) * rows

    @pl.when((step == 0) & (first_row < walk.active))
    def _() -> None:
        next_slot[0] = 0
        walk.begin()

    @pl.when(first_row + rows > walk.active)
    def _() -> None:
        output[...] = jnp.zeros_like(output)

    def attend(end: jax.Array, slot: jax.Array) -> None:
        for pages, smaller in zip(sizes.computed, [*sizes.computed[1:], 0], strict=True):
            enough, too_few = pages * fetcher.page_size, smaller * fetcher.page_size

            @pl.when((end > too_few) & ((end <= enough) | (pages == sizes.computed[0])))
            def _(pages: int = pages, enough: int = enough) -> None:
                @pl.when(end < enough)
                def _() -> None:
                    fetcher.clear_values_from(end, slot, pages)

                runs = [_run(fetcher, slot, run, end) for run in runs_of(pages, fetcher.page_size, queries.shape[1])]
                _add_in_turn(sums, spread_queries[...], per_head, runs, options)

    def attend_row(number: jax.Array) -> None:
        place = number - first_row
        spread_queries[...] = _spread(queries[place], buffers.shape[2])
        sums.store(start_softmax(per_head, output.shape[1:], options))
        next_slot[0] = walk.through_row(number, next_slot[0], attend)
        output[place] = _result(plan.lengths[number], sums.load(), per_head).astype(output.dtype)

    def attend_group(first: jax.Array) -> None:
        group = walk.group(first)
        slot = next_slot[0]
        next_slot[0] = (slot + 1) % walk.depth
        in_between = walk.through_group(first, slot)
        blocks = [_block_of_row(fetcher, groups.pages, slot, member, row) for member, row in enumerate(group)]
        place = first - first_row
        starts = [start_softmax(per_head, output.shape[1:], options) for _ in group]
        spread = [_spread(queries[place + member], buffers.shape[2]) for member in range(together)]
        sums = _add_blocks(starts, spread, per_head, blocks, options, in_between)
        results = [_result(row.length, softmax, per_head) for row, softmax in zip(group, sums, strict=True)]
        for member, result in enumerate(results):
            output[place + member] = result.astype(output.dtype)

    @pl.loop(first_row, jnp.minimum(first_row + rows, walk.active), step=together)
    def _(first: jax.Array) -> None:
        if together == 1:
            attend_row(first)
            return
        short = walk.pages_of_group(first) >= 0

        @pl.when(short)
        def _() -> None:
            attend_group(first)

        @pl.when(jnp.logical_not(short))
        def _() -> None:
            pl.loop(first, jnp.minimum(first + together, walk.active))(attend_row)


def _result(length: jax.Array, softmax: Softmax, per_head: Ref) -> jax.Array:
    _, total, weighted = softmax
    return jnp.where(length > 0, finish_softmax(total, weighted, per_head[OUTPUT_FACTOR]), 0.0)


@dataclass(frozen=True)
class _Block:
    """Keys and values that are computed together: consecutive references to pages, each `[pages, kv_heads, page_size,
    lanes]`. Slots from `end` on are not the row's."""

    keys: list[Ref]
    values: list[Ref]
    end: jax.Array
    pages: jax.Array | None = None


def _run(fetcher: PageFetcher, slot: jax.Array, run: tuple[int, int], end: jax.Array) -> _Block:
    """A run of pages (see `runs_of`) of a row's block, whose keys end at slot `end` of the block."""
    buffers, (first, count) = fetcher.buffers, run
    keys, values = (buffers.at[slot, pl.ds(first, count), :, part] for part in (0, buffers.shape[3] - 1))
    return _Block([keys], [values], end - first * fetcher.page_size)


def _block_of_row(fetcher: PageFetcher, pages: int, slot: jax.Array, member: int, row: Row) -> _Block:
    """The block of a row of a short group. Values of unused slots are zeroed: their weights are zero, but unwritten
    memory may be NaN."""
    buffers, first = fetcher.buffers, member * pages
    last = jnp.maximum(row.pages - 1, 0)
    fetcher.clear_values_of(slot, first + last, row.length - last * fetcher.page_size)
    values = [buffers.at[slot, pl.ds(first + page, 1), :, buffers.shape[3] - 1] for page in range(pages)]
    return _Block([buffers.at[slot, pl.ds(first, pages), :, 0]], values, row.length, row.pages)


@dataclass(frozen=True)
class _Sums:
    """A row's softmax in vector memory: carried by the loop, it would take the registers that scores need."""

    largest: Ref
    total: Ref
    weighted: Ref

    def load(self) -> Softmax:
        return self.largest[...], self.total[...], self.weighted[...]

    def store(self, softmax: Softmax) -> None:
        self.largest[...], self.total[...], self.weighted[...] = softmax


def _own_rows(heads: int, kv_heads: int, kv_head: int, columns: int) -> jax.Array:
    """A mask `[heads, columns]` of the query heads of one kv head."""
    group = heads // kv_heads
    head = jax.lax.broadcasted_iota(jnp.int32, (heads, columns), 0)
    return (head >= kv_head * group) & (head < (kv_head + 1) * group)


def _spread(matrix: jax.Array, kv_heads: int) -> jax.Array:
    """`[heads, n]` → `[heads, kv_heads * n]`: each row in the columns of its kv head, zeros elsewhere."""
    heads, columns = matrix.shape
    zeros = jnp.zeros_like(matrix)
    own = [jnp.where(_own_rows(heads, kv_heads, head, columns), matrix, zeros) for head in range(kv_heads)]
    return jnp.concatenate(own, axis=1)


def _add_blocks(
    sums: list[Softmax],
    spread_queries: list[jax.Array],
    per_head: Ref,
    blocks: list[_Block],
    options: StaticOptions,
    in_between: Sequence[Callable[[], None]] = (),
) -> list[Softmax]:
    """Adds a block of keys to the softmax of each row, each step for all rows before the next: products have a long
    latency, and complete in order."""
    scores = []
    for queries, block, also in zip_longest(spread_queries, blocks, in_between):
        scores.append(_scores(queries, block, per_head, options))
        if also is not None:
            also()
    weights = [_weights(*each, per_head) for each in zip(sums, scores, strict=True)]
    return [_weighted(*each) for each in zip(weights, blocks, strict=True)]


def _add_in_turn(
    sums: _Sums, spread_queries: jax.Array, per_head: Ref, runs: list[_Block], options: StaticOptions
) -> None:
    """Adds runs of keys to a row's softmax. A run's scores are computed before the softmax of the run before it, so
    that matrix and vector units work at the same time."""
    scores = _scores(spread_queries, runs[0], per_head, options)
    for run, after in zip_longest(runs, runs[1:]):
        further = None if after is None else _scores(spread_queries, after, per_head, options)
        sums.store(_weighted(_weights(sums.load(), scores, per_head), run))
        scores = further


def _side(
    pages: list[Ref], axis: int, dtype: jnp.dtype, lanes: int | None = None, there: jax.Array | None = None
) -> jax.Array:
    """The keys or values of a block, concatenated over kv heads along `axis`. `lanes`: the number of their first lanes
    that are needed, None for all; `there`: pages from this one on are 0."""
    _, kv_heads, _, all_lanes = pages[0].shape
    lanes = lanes or all_lanes

    def load(number: int, head: int) -> jax.Array:
        found = pages[number][:, head, :, :lanes].reshape(-1, lanes)
        if there is not None and number > 0:
            found = jnp.where(number < there, found, jnp.zeros_like(found))
        return found.astype(dtype)

    heads = [[load(number, head) for number in range(len(pages))] for head in range(kv_heads)]
    return jnp.concatenate([jnp.concatenate(parts, axis=0) for parts in heads], axis=axis)


def _scores(spread_queries: jax.Array, block: _Block, per_head: Ref, options: StaticOptions) -> jax.Array:
    """Scores `[heads, keys]`, `MASKED` if a query must not see the key."""
    scores = matmul_nt(spread_queries, _side(block.keys, 1, spread_queries.dtype))
    place = jax.lax.broadcasted_iota(jnp.int32, (1, scores.shape[1]), 1)
    visible = place < block.end
    if options.window is not None:
        visible &= place >= block.end - options.window
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(lanewise(jnp.multiply, scores, per_head[SOFT_CAP_FACTOR]))
    return jnp.where(visible, scores, MASKED)


def _weights(softmax: Softmax, scores: jax.Array, per_head: Ref) -> tuple[Softmax, jax.Array]:
    """Adds scores to the softmax, except for their values; returns it and the weights of the scores."""
    largest, total, weighted = softmax
    unit = per_head[SCORE_UNIT]
    new_largest = jnp.maximum(largest, largest_of_rows(scores))
    weights = lanewise(lambda tile: jnp.exp2((tile - new_largest) * unit), scores)
    shrink = jnp.exp2((largest - new_largest) * unit)
    total = total * shrink + sum_of_lane_tiles(weights)
    return (new_largest, total, lanewise(jnp.multiply, weighted, shrink)), weights


def _weighted(softmax_and_weights: tuple[Softmax, jax.Array], block: _Block) -> Softmax:
    (largest, total, weighted), weights = softmax_and_weights
    _, kv_heads, _, _ = block.values[0].shape
    dtype, lanes = type_of_products(block.values[0].dtype), weighted.shape[1]
    added = matmul(_spread(weights.astype(dtype), kv_heads), _side(block.values, 0, dtype, lanes, block.pages))
    return largest, total, weighted + added
