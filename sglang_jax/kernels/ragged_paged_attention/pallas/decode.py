"""Attention of decode rows, one query each: bound by the speed at which keys and values arrive.

A core works rows off one after the other, each in blocks of keys, and the pages of the next blocks, be they this row's
or of those after it, are always under way, as many as there are further buffers (`depth_of`): a block of one kv head is
a few hundred KiB, which arrive in less time than the first byte of a copy takes. Of a row's last block the half or the
quarter is computed where the rest has no keys. All query heads of a row go through the matrix units together: row r
of the left operand holds query head r in the lanes of its own kv head and zeros elsewhere, so that one product with
the keys of all kv heads, side by side, gives `[heads, keys]` scores in whole registers. The zeros cost nothing:
with so few rows the time is that of loading keys into the unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

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
    SOFT_CAP_FACTOR,
    Softmax,
    StaticOptions,
    constants_per_head,
    finish_softmax,
    lanewise,
    largest_of_rows,
    matmul,
    matmul_nt,
    start_softmax,
    static_options,
    sum_of_lane_tiles,
    type_of_products,
)

_LEAST_DEPTH, _MOST_DEPTH = 4, 8
_BYTES_OF_BUFFERS = 16 << 20

_PARTS = (1, 2, 4)
"""What is computed of a block: all of it, a half or a quarter."""

_FEWEST_KEYS = 128
"""That are computed: a whole register of scores for each head."""

_TURN, _DONE, _PAGES, _FIRST_PAGE = range(4)
"""What is started next: of which row (by its turn), and of the row's pages how many are started, how many there are,
and in which column of the page table they begin."""


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Rows per program and pages per block of keys."""

    rows: int
    pages: int


def depth_of(block_bytes: int) -> int:
    """Blocks that there are buffers for. With two, what memory delivers while a copy is on its way is lost: by a model
    of the pipeline (`tpu.kernel_costs`) half of it for one kv head of Qwen3-32B on v6e, and almost nothing with four.
    Rows of a few hundred keys fill a part of each, and need more."""
    return min(max(_BYTES_OF_BUFFERS // block_bytes, _LEAST_DEPTH), _MOST_DEPTH)


def computed_pages(pages: int, page_size: int) -> list[int]:
    """The pages of a block of `pages` that are computed at once, most first: all, and of a row's last block fewer."""
    return [pages // part for part in _PARTS if part == 1 or pages // part * page_size >= _FEWEST_KEYS]


@dataclass(frozen=True)
class _Row:
    """The keys that a row sees lie in page-table columns `first_page` and on, `pages` of them."""

    number: Scalar
    kv_len: jax.Array
    first_page: jax.Array
    pages: jax.Array
    blocks: jax.Array


@dataclass(frozen=True)
class _Rows:
    """The walk over the rows of a core, of which those below `active` take part, and their pages ahead of them.

    Rows count in the order in which the core comes to them: `turn` t is row `number_of(t)`. Cores take the programs
    of `at_once` rows in turn, so that all have as many rows whatever the bucket's padding.

    `ahead`: SMEM int32 `[4]`, the block whose copies are started next.
    """

    fetcher: PageFetcher
    kv_lens: Ref
    active: jax.Array
    window: int | None
    ahead: Ref
    core: Scalar
    cores: int
    at_once: int

    @property
    def depth(self) -> int:
        """Blocks that there are buffers for, and rows whose page numbers are there or on their way: rows may be a block
        long each."""
        return self.fetcher.buffers.shape[0]

    def number_of(self, turn: Scalar) -> Scalar:
        """The row's place in the batch."""
        if self.cores == 1:
            return turn
        return (turn // self.at_once * self.cores + self.core) * self.at_once + turn % self.at_once

    def begin(self) -> None:
        """Starts the copies that the first blocks wait for."""
        for turn in range(self.depth):
            number = self.number_of(turn)

            @pl.when(number < self.active)
            def _(number: Scalar = number, turn: int = turn) -> None:
                self.fetcher.start_numbers(number, turn)

        self._go_on_with(jnp.int32(0))
        for slot in range(self.depth - 1):
            self._start_next(slot)

    def row(self, number: Scalar) -> _Row:
        """A row without keys has one block without pages: whoever looks for the next block need not skip it."""
        kv_len = self.kv_lens[number]
        first_key = 0 if self.window is None else jnp.maximum(kv_len - self.window, 0)
        first_page = jnp.int32(first_key) // self.fetcher.page_size
        pages = pl.cdiv(kv_len, self.fetcher.page_size) - first_page
        return _Row(number, kv_len, first_page, pages, jnp.maximum(pl.cdiv(pages, self.fetcher.pages_per_block), 1))

    def through(self, row: _Row, first_slot: jax.Array, attend: Callable[[jax.Array, jax.Array], None]) -> None:
        """Calls `attend` with each block of the row when it is there, with the next ones on their way: the number of
        the row's keys from the block on, and its buffer; the first is in `first_slot`."""
        fetcher = self.fetcher

        @pl.loop(0, row.blocks)
        def _(block: jax.Array) -> None:
            slot = (first_slot + block) % self.depth
            # The buffer of the block before this one, with which all is done.
            self._start_next((slot + self.depth - 1) % self.depth)
            done = block * fetcher.pages_per_block
            fetcher.wait_for_block(jnp.minimum(row.pages - done, fetcher.pages_per_block), slot)
            attend(row.kv_len - (row.first_page + done) * fetcher.page_size, slot)

    def _start_next(self, slot: Scalar) -> None:
        """Starts the copies of the next block, if there is one, into a buffer."""
        turn, done, pages = self.ahead[_TURN], self.ahead[_DONE], self.ahead[_PAGES]
        at_once = self.fetcher.pages_per_block
        number, numbers_slot = self.number_of(turn), turn % self.depth

        @pl.when(number < self.active)
        def _() -> None:
            @pl.when(done == 0)
            def _() -> None:
                self.fetcher.wait_for_numbers(number, numbers_slot)

            first = self.ahead[_FIRST_PAGE] + done
            self.fetcher.start_block(numbers_slot, first, jnp.minimum(pages - done, at_once), slot)
            self.ahead[_DONE] = done + at_once

            @pl.when(done + at_once >= pages)
            def _() -> None:
                self._start_row_after(turn, numbers_slot)

    def _start_row_after(self, turn: jax.Array, numbers_slot: jax.Array) -> None:
        """The numbers of the row are no longer needed: those of a later one take their place."""
        later = self.number_of(turn + self.depth)

        @pl.when(later < self.active)
        def _() -> None:
            self.fetcher.start_numbers(later, numbers_slot)

        self._go_on_with(turn + 1)

    def _go_on_with(self, turn: jax.Array) -> None:
        number = self.number_of(turn)
        self.ahead[_TURN] = turn

        @pl.when(number < self.active)
        def _() -> None:
            row = self.row(number)
            self.ahead[_DONE] = 0
            self.ahead[_PAGES] = row.pages
            self.ahead[_FIRST_PAGE] = row.first_page


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
    """Attention of the first `num_decode` rows.

    **Arguments:** `queries` `[R, heads, lanes]`, R a multiple of `blocks.rows * cores`; `kv_pages` `[num_pages,
    kv_heads, parts, page_size, lanes]`; `page_table` int32 `[R, 1, columns]`; `kv_lens` int32 `[R]`; `num_decode` int32
    `[1]`; `cores`: that share the work, a program at a time; `checked`: with checks of addresses.

    **Returns:** `[R, heads, lanes]` in the type of the queries; 0 for the other rows.
    """
    rows, heads, lanes = queries.shape
    _, kv_heads, parts, page_size, _ = kv_pages.shape
    columns = page_table.shape[2]
    per_head = constants_per_head(heads, kv_heads, scale, options)
    block = pl.BlockSpec((blocks.rows, heads, lanes), lambda core, step, *_: (step * cores + core, 0, 0))
    compute_dtype = type_of_products(kv_pages.dtype)
    depth = depth_of(blocks.pages * kv_heads * parts * page_size * lanes * kv_pages.dtype.itemsize)
    return pl.pallas_call(
        functools.partial(_kernel, options=static_options(options), cores=cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, rows // blocks.rows // cores),
            in_specs=[
                block,
                pl.BlockSpec(per_head.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((depth, blocks.pages, kv_heads, parts, page_size, lanes), kv_pages.dtype),
                pltpu.VMEM((heads, kv_heads * lanes), compute_dtype),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, lanes), jnp.float32),
                pltpu.SMEM((depth * columns,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((depth,)),
                pltpu.SemaphoreType.DMA((depth,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            disable_bounds_checks=not checked,
        ),
        name="paged_attention_decode",
    )(kv_lens, num_decode, queries.astype(compute_dtype), per_head, page_table, kv_pages)


def _kernel(
    kv_lens: Ref,  # SMEM [R]
    num_decode: Ref,  # SMEM [1]
    queries: Ref,  # VMEM [rows, heads, lanes]
    per_head: Ref,  # VMEM [4, heads, 128]
    page_table: Ref,  # HBM [R, 1, columns]
    kv_pages: Ref,  # HBM [num_pages, kv_heads, parts, page_size, lanes]
    output: Ref,  # VMEM [rows, heads, lanes]
    buffers: Ref,
    spread_queries: Ref,  # VMEM [heads, kv_heads * lanes]
    largest: Ref,  # VMEM [heads, 128], as is the total
    total: Ref,
    weighted: Ref,  # VMEM [heads, lanes]
    page_numbers: Ref,
    next_slot: Ref,  # SMEM [1]: the buffer of the block that comes next
    ahead: Ref,  # SMEM [4]: the block whose copies are started next
    kv_arrived: Ref,
    numbers_arrived: Ref,
    *,
    options: StaticOptions,
    cores: int,
) -> None:
    fetcher = PageFetcher(kv_pages, page_table, buffers, page_numbers, kv_arrived, numbers_arrived)
    rows, core, step = queries.shape[0], pl.program_id(0), pl.program_id(1)
    walk = _Rows(fetcher, kv_lens, num_decode[0], options.window, ahead, core, cores, rows)
    sums = _Sums(largest, total, weighted)
    first_row = (step * cores + core) * rows

    @pl.when((step == 0) & (first_row < walk.active))
    def _() -> None:
        next_slot[0] = 0
        walk.begin()

    @pl.when(first_row + rows > walk.active)
    def _() -> None:
        output[...] = jnp.zeros_like(output)

    sizes = computed_pages(fetcher.pages_per_block, fetcher.page_size)

    def attend(end: jax.Array, slot: jax.Array) -> None:
        for pages, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
            enough, too_few = pages * fetcher.page_size, smaller * fetcher.page_size

            @pl.when((end > too_few) & ((end <= enough) | (pages == sizes[0])))
            def _(pages: int = pages, enough: int = enough) -> None:
                @pl.when(end < enough)
                def _() -> None:
                    fetcher.clear_values_from(end, slot, pages)

                begin = None if options.window is None else end - options.window
                block = buffers.at[slot, pl.ds(0, pages)]
                sums.store(_add_block(sums.load(), spread_queries, per_head, block, begin, end, options))

    @pl.loop(first_row, jnp.minimum(first_row + rows, walk.active))
    def _(number: jax.Array) -> None:
        row = walk.row(number)
        place = number - first_row
        spread_queries[...] = _spread(queries[place], buffers.shape[2])
        sums.store(start_softmax(per_head, queries.shape[1:], options))
        walk.through(row, next_slot[0], attend)
        next_slot[0] = (next_slot[0] + row.blocks) % walk.depth
        result = finish_softmax(total[...], weighted[...], per_head[OUTPUT_FACTOR])
        output[place] = jnp.where(row.kv_len > 0, result, 0.0).astype(output.dtype)


@dataclass(frozen=True)
class _Sums:
    """Memory of a row's softmax: carried by the loop, it would take the registers that scores need."""

    largest: Ref
    total: Ref
    weighted: Ref

    def load(self) -> Softmax:
        return self.largest[...], self.total[...], self.weighted[...]

    def store(self, softmax: Softmax) -> None:
        self.largest[...], self.total[...], self.weighted[...] = softmax


def _own_rows(heads: int, kv_heads: int, kv_head: int, columns: int) -> jax.Array:
    """Which rows of `[heads, columns]` belong to query heads of a kv head."""
    group = heads // kv_heads
    head = jax.lax.broadcasted_iota(jnp.int32, (heads, columns), 0)
    return (head >= kv_head * group) & (head < (kv_head + 1) * group)


def _spread(matrix: jax.Array, kv_heads: int) -> jax.Array:
    """`[heads, n]` → `[heads, kv_heads * n]`: each row in the columns of its kv head, zeros elsewhere."""
    heads, columns = matrix.shape
    zeros = jnp.zeros_like(matrix)
    own = [jnp.where(_own_rows(heads, kv_heads, head, columns), matrix, zeros) for head in range(kv_heads)]
    return jnp.concatenate(own, axis=1)


def _add_block(
    softmax: Softmax,
    spread_queries: Ref,
    per_head: Ref,
    block: Ref,
    begin: jax.Array | None,
    end: jax.Array,
    options: StaticOptions,
) -> Softmax:
    """Takes the slots `begin` to `end` of a block of keys, `[pages, kv_heads, parts, page_size, lanes]`, into the
    softmax."""
    largest, total, weighted = softmax
    _, kv_heads, parts, _, lanes = block.shape
    dtype = spread_queries.dtype

    def side(part: int, axis: int) -> jax.Array:
        heads = [block[:, head, part].reshape(-1, lanes).astype(dtype) for head in range(kv_heads)]
        return jnp.concatenate(heads, axis=axis)

    scores = matmul_nt(spread_queries[...], side(0, axis=1))
    place = jax.lax.broadcasted_iota(jnp.int32, (1, scores.shape[1]), 1)
    visible = place < end if begin is None else (place < end) & (place >= begin)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(lanewise(jnp.multiply, scores, per_head[SOFT_CAP_FACTOR]))
    scores = jnp.where(visible, scores, MASKED)
    unit = per_head[SCORE_UNIT]
    new_largest = jnp.maximum(largest, largest_of_rows(scores))
    weights = lanewise(lambda tile: jnp.exp2((tile - new_largest) * unit), scores)
    shrink = jnp.exp2((largest - new_largest) * unit)
    added = matmul(_spread(weights.astype(dtype), kv_heads), side(parts - 1, axis=0))
    return (
        new_largest,
        total * shrink + sum_of_lane_tiles(weights),
        lanewise(jnp.multiply, weighted, shrink) + added,
    )
