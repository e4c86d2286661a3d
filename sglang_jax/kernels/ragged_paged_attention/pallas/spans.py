"""The order in which the prefill kernel processes spans of sequences, and the copies of pages that run ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sglang_jax.kernels.ragged_paged_attention.pallas.pages import PageFetcher, Ref, Scalar


@dataclass(frozen=True)
class Span:
    """The tokens `first` to `last` (exclusive) of one sequence, all in one block of queries. Token t of the batch is at
    position `t + shift` of its sequence. The span's visible keys are in `pages` page-table columns from `first_page`
    on. Its first block of pages has room for `skipped` pages before them."""

    sequence: Scalar
    first: Scalar
    last: Scalar
    shift: Scalar
    first_page: Scalar
    pages: Scalar
    skipped: Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cursor:
    """The state of a walk over the spans of all blocks of queries: int32 scalars.

    - `sequence`: the next span's sequence, whose first block of pages is being fetched; R if none is left.
    - `following`: the next sequence with queries, whose page numbers are being fetched; R if none is left.
    - `place`: the next span's first token.
    - `numbers_slot`: the slot of the sequence's page numbers; `slot`: the buffer of the span's first block.
    """

    sequence: jax.Array
    following: jax.Array
    place: jax.Array
    numbers_slot: jax.Array
    slot: jax.Array

    SIZE: ClassVar[int] = 5

    @classmethod
    def load(cls, state: Ref) -> Cursor:
        """Reads the previous program's cursor from scalar memory `[SIZE]`."""
        return cls(state[0], state[1], state[2], state[3], state[4])

    def store(self, state: Ref) -> None:
        state[0], state[1], state[2] = self.sequence, self.following, self.place
        state[3], state[4] = self.numbers_slot, self.slot


@dataclass(frozen=True)
class Walk:
    """A walk over the sequences from `num_decode` on, in blocks of `width` queries and of pages, up to the token at
    `last_place` (exclusive), where another core's share starts. `kv_lens` int32 `[R]`, `query_starts` int32 `[R + 1]`,
    `num_decode` int32 `[1]`: in scalar memory. `fixed`: blocks of pages are at fixed places of a sequence; otherwise
    the first one starts at the first page that a span needs."""

    fetcher: PageFetcher
    kv_lens: Ref
    query_starts: Ref
    num_decode: Ref
    width: int
    window: int | None
    last_place: Scalar
    fixed: bool = False

    @property
    def sequences(self) -> int:
        """The padded number of sequences, R."""
        return self.kv_lens.shape[0]

    @property
    def tokens(self) -> jax.Array:
        """The number of tokens without padding."""
        return self.query_starts[self.sequences]

    def begin(self, first_place: Scalar) -> Cursor:
        """Starts the first copies. Returns the cursor of a core's first program, whose queries start at
        `first_place`."""
        sequence = self._with_queries_after(self.num_decode[0] - 1, first_place)
        following = self._with_queries_after(sequence)
        place = jnp.maximum(self.query_starts[sequence], first_place)
        self._start_numbers(sequence, 0)
        self._start_sequence(sequence, place, 0, 0)
        self._start_numbers(following, 1)
        return Cursor(sequence, following, place, jnp.int32(0), jnp.int32(0))

    def through_block(
        self, cursor: Cursor, end_place: Scalar, attend: Callable[[Span, Scalar, Scalar], None]
    ) -> Cursor:
        """Calls `attend(span, position of the block's first slot, buffer)` for each span before `end_place`, the end of
        a block of queries, and each block of the span's pages when it has arrived. A span's first block has no pages in
        its first `skipped` places."""
        return jax.lax.while_loop(
            lambda cursor: (cursor.sequence < self.sequences) & (cursor.place < end_place),
            lambda cursor: self._through_span(cursor, end_place, attend),
            cursor,
        )

    def _through_span(
        self, cursor: Cursor, end_place: Scalar, attend: Callable[[Span, Scalar, Scalar], None]
    ) -> Cursor:
        span = self._span_at(cursor.sequence, cursor.place, end_place)
        pages_per_block = self.fetcher.pages_per_block
        blocks = pl.cdiv(span.skipped + span.pages, pages_per_block)
        continues = self.query_starts[span.sequence + 1] > end_place
        after = self._with_queries_after(cursor.following)

        @pl.loop(0, blocks)
        def _(index: jax.Array) -> None:
            slot = (cursor.slot + index) % 2
            last = index + 1 == blocks

            @pl.when(jnp.logical_not(last))
            def _() -> None:
                self._start_block(span, index + 1, cursor.numbers_slot, 1 - slot)

            @pl.when(last & continues & (end_place < self.last_place))
            def _() -> None:
                self._start_first_block(span.sequence, end_place, cursor.numbers_slot, 1 - slot)

            @pl.when(last & jnp.logical_not(continues))
            def _() -> None:
                place = self.query_starts[cursor.following]
                self._start_sequence(cursor.following, place, 1 - cursor.numbers_slot, 1 - slot)
                self._start_numbers(after, cursor.numbers_slot)

            _, count, _ = self._pages_of_block(span, index)
            self.fetcher.wait_for_block(count, slot)
            first_page = span.first_page - span.skipped + index * pages_per_block
            attend(span, first_page * self.fetcher.page_size, slot)

        return Cursor(
            sequence=jnp.where(continues, span.sequence, cursor.following),
            following=jnp.where(continues, cursor.following, after),
            place=jnp.where(continues, end_place, self.query_starts[cursor.following]),
            numbers_slot=jnp.where(continues, cursor.numbers_slot, 1 - cursor.numbers_slot),
            slot=(cursor.slot + blocks) % 2,
        )

    def _with_queries_after(self, sequence: Scalar, first_place: Scalar = 0) -> jax.Array:
        """The next sequence that has queries from `first_place` on; R if it starts in another core's share."""
        starts, sequences = self.query_starts, self.sequences
        end = jnp.minimum(self.tokens, self.last_place)

        def has_none(candidate: jax.Array) -> jax.Array:
            last = starts[jnp.minimum(candidate + 1, sequences)]
            return (starts[candidate] < end) & (last <= jnp.maximum(starts[candidate], first_place))

        found = jax.lax.while_loop(
            has_none, lambda candidate: candidate + 1, jnp.minimum(jnp.int32(sequence) + 1, sequences)
        )
        return jnp.where(starts[found] < end, found, sequences)

    def _span_at(self, sequence: Scalar, first: Scalar, block_end: Scalar) -> Span:
        last = jnp.minimum(self.query_starts[sequence + 1], block_end)
        shift = self.kv_lens[sequence] - self.query_starts[sequence + 1]
        first_key = 0 if self.window is None else jnp.maximum(first + shift - (self.window - 1), 0)
        first_page = jnp.int32(first_key) // self.fetcher.page_size
        pages = pl.cdiv(last + shift, self.fetcher.page_size) - first_page
        skipped = first_page % self.fetcher.pages_per_block if self.fixed else 0
        return Span(sequence, first, last, shift, first_page, pages, skipped)

    def _pages_of_block(self, span: Span, block: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """The first page-table column of a block of a span, its number of pages, and the first one's place in the
        block."""
        pages_per_block = self.fetcher.pages_per_block
        place = jnp.where(block == 0, span.skipped, 0) if self.fixed else 0
        done = block * pages_per_block - span.skipped + place
        return span.first_page + done, jnp.minimum(span.pages - done, pages_per_block - place), place

    def _start_block(self, span: Span, block: Scalar, numbers_slot: Scalar, slot: Scalar) -> None:
        first, count, place = self._pages_of_block(span, block)
        self.fetcher.start_block(numbers_slot, first, count, slot, place)

    def _start_first_block(self, sequence: Scalar, place: Scalar, numbers_slot: Scalar, slot: Scalar) -> None:
        block_end = (place // self.width + 1) * self.width
        self._start_block(self._span_at(sequence, place, block_end), 0, numbers_slot, slot)

    def _start_numbers(self, sequence: Scalar, numbers_slot: Scalar) -> None:
        @pl.when(sequence < self.sequences)
        def _() -> None:
            self.fetcher.start_numbers(sequence, numbers_slot)

    def _start_sequence(self, sequence: Scalar, place: Scalar, numbers_slot: Scalar, slot: Scalar) -> None:
        @pl.when(sequence < self.sequences)
        def _() -> None:
            self.fetcher.wait_for_numbers(sequence, numbers_slot)
            self._start_first_block(sequence, place, numbers_slot, slot)
