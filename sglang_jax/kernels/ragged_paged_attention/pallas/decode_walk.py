"""The order in which the decode kernel processes blocks of pages, and the copies that run ahead of it. Groups are
consecutive rows. If all rows of a group are short, their pages are one block, with one wait, and computing one row
fills the latencies of the others' products. Otherwise each row of the group has its own blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import Groups
from sglang_jax.kernels.ragged_paged_attention.pallas.pages import PageFetcher, Ref, Scalar

_TURN, _NUMBER, _DONE = range(3)
"""The next block to fetch: its group's index in the core's order; if that is not short, the row, and the number of the
row's pages that are already being fetched."""


@dataclass(frozen=True)
class Row:
    """A row's visible keys are among the `length` slots of its `pages` page-table columns from `first_page` on."""

    number: Scalar
    length: jax.Array
    first_page: Scalar
    pages: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """The rows of a walk: int32 arrays; in a kernel, references to them in scalar memory. `lengths`, `pages`,
    `first_pages` `[R]`: see `Row`; 0 for rows that are not decoded. `first_pages` is None if all are 0. `groups` `[R /
    together]`: the number of pages of a short group, -1 for other groups."""

    lengths: Ref
    pages: Ref
    first_pages: Ref | None
    groups: Ref

    @staticmethod
    def of(
        kv_lens: jax.Array,
        num_decode: jax.Array,
        *,
        rows: int,
        together: int,
        pages_of_short: int,
        page_size: int,
        window: int | None,
    ) -> Plan:
        """The plan of a step, shared by its layers: `rows` rows, of which the first `num_decode` are decoded."""
        kv_lens = jnp.pad(kv_lens, (0, rows - len(kv_lens)))
        kv_lens = jnp.where(jnp.arange(rows) < num_decode, kv_lens, 0)
        first_pages = None if window is None else jnp.maximum(kv_lens - window, 0) // page_size
        lengths = kv_lens if first_pages is None else kv_lens - first_pages * page_size
        pages = pl.cdiv(lengths, page_size)
        of_groups = pages.reshape(-1, together)
        short = (of_groups <= pages_of_short).all(axis=1)
        return Plan(lengths, pages, first_pages, jnp.where(short, of_groups.sum(axis=1), -1))

    def row(self, number: Scalar) -> Row:
        first_page = 0 if self.first_pages is None else self.first_pages[number]
        return Row(number, self.lengths[number], first_page, self.pages[number])


@dataclass(frozen=True)
class Walk:
    """A core's walk over the rows below `active`, with the copies of pages ahead of it. `turn` is a group's index in
    the core's order; the group starts with row `first_of(turn)`. Programs of `at_once` rows go to the cores in
    rotation, so that all have the same number of rows whatever the bucket's padding.

    The page table of `fetcher` has one entry per group of `together` rows. `ahead`: SMEM int32 `[AHEAD]`, the next
    block to fetch.
    """

    fetcher: PageFetcher
    plan: Plan
    active: jax.Array
    ahead: Ref
    core: Scalar
    cores: int
    at_once: int
    groups: Groups
    pages_per_block: int

    AHEAD: ClassVar[int] = 3

    @property
    def depth(self) -> int:
        """The number of buffers, and of groups whose page numbers are fetched ahead: a group may be one block."""
        return self.fetcher.buffers.shape[0]

    @property
    def rows(self) -> int:
        return self.plan.lengths.shape[0]

    @property
    def together(self) -> int:
        return self.groups.rows

    def first_of(self, turn: Scalar) -> Scalar:
        """The group's first row, as an index into the batch."""
        if self.cores > 1:
            groups = self.at_once // self.together
            turn = (turn // groups * self.cores + self.core) * groups + turn % groups
        return turn * self.together

    def begin(self) -> None:
        """Starts the copies of the first blocks."""
        for turn in range(self.depth):
            self._start_numbers(turn)
        self._advance_to(0)
        pl.loop(0, self.depth - 1)(self._start_next)

    def group(self, first: Scalar) -> list[Row]:
        """The rows of a group; rows that are not decoded have no keys."""
        return [self.plan.row(first + member) for member in range(self.together)]

    def pages_of_group(self, first: Scalar) -> jax.Array:
        """The number of a short group's pages, -1 for other groups."""
        return self.plan.groups[first // self.together]

    def through_group(self, first: Scalar, slot: jax.Array) -> list[Callable[[], None]]:
        """Waits until the pages of a short group are in the buffer `slot`. Returns a function per row that starts
        copies of the next block. The caller calls them between its own computations: the compiler moves no memory
        access over the start of a copy, but it does move arithmetic."""
        self.fetcher.wait_for_block(self.pages_of_group(first), slot)
        free = (slot + self.depth - 1) % self.depth
        turn = self.ahead[_TURN]
        there, short = self._exists(turn), self._is_short(turn)
        pl.when(there & jnp.logical_not(short))(lambda: self._start_part_of_row(turn, free))
        return self._row_starts(turn, free, short)

    def through_row(
        self, number: Scalar, first_slot: jax.Array, attend: Callable[[jax.Array, jax.Array], None]
    ) -> jax.Array:
        """Calls `attend(number of the row's keys from this block on, buffer)` with each block of a row when it has
        arrived, and fetches later ones meanwhile. The row's first block is in buffer `first_slot`; returns that of the
        next row. A row without keys has one block without pages, so that it needs no special case."""
        fetcher, row = self.fetcher, self.plan.row(number)
        blocks = jnp.maximum(pl.cdiv(row.pages, self.pages_per_block), 1)

        @pl.loop(0, blocks)
        def _(block: jax.Array) -> None:
            slot = (first_slot + block) % self.depth
            # The buffer of the previous block, which is no longer read.
            self._start_next((slot + self.depth - 1) % self.depth)
            done = block * self.pages_per_block
            fetcher.wait_for_block(jnp.minimum(row.pages - done, self.pages_per_block), slot)
            attend(row.length - done * fetcher.page_size, slot)

        return (first_slot + blocks) % self.depth

    def _start_numbers(self, turn: Scalar) -> None:
        first = self.first_of(turn)

        @pl.when(first < self.active)
        def _() -> None:
            self.fetcher.start_numbers(first // self.together, turn % self.depth)

    def _exists(self, turn: Scalar) -> jax.Array:
        return self.first_of(turn) < self.active

    def _is_short(self, turn: Scalar) -> jax.Array:
        """Whether the group exists and its rows share a block."""
        return self._exists(turn) & (self.pages_of_group(jnp.minimum(self.first_of(turn), self.rows - 1)) >= 0)

    def _start_next(self, slot: Scalar) -> None:
        """Starts the copies of the next block, if any, into a buffer."""
        turn = self.ahead[_TURN]
        there = self._exists(turn)
        if self.together == 1:
            pl.when(there)(lambda: self._start_part_of_row(turn, slot))
            return
        short = self._is_short(turn)
        pl.when(there & jnp.logical_not(short))(lambda: self._start_part_of_row(turn, slot))
        pl.when(short)(lambda: self._start_group(turn, slot))

    def _start_group(self, turn: jax.Array, slot: Scalar) -> None:
        first, numbers_slot = self.first_of(turn), turn % self.depth
        self.fetcher.wait_for_numbers(first // self.together, numbers_slot)

        @pl.loop(0, self.together)
        def _(member: jax.Array) -> None:
            row = self.plan.row(first + member)
            place = self._place(numbers_slot, member) + row.first_page
            self.fetcher.start_pages(place, row.pages, slot, member * self.groups.pages)

        self._end_group(turn)

    def _row_starts(self, turn: jax.Array, slot: Scalar, short: jax.Array) -> list[Callable[[], None]]:
        """As `_start_group`, if it is short, but as one call per row without branches."""
        first, numbers_slot = jnp.minimum(self.first_of(turn), self.rows - self.together), turn % self.depth
        pl.when(short)(lambda: self.fetcher.wait_for_numbers(first // self.together, numbers_slot))

        def start(member: int) -> None:
            row = self.plan.row(first + member)
            place = self._place(numbers_slot, member) + row.first_page
            pages = jnp.where(short, row.pages, 0)
            self.fetcher.start_few_pages(place, pages, slot, member * self.groups.pages, self.groups.pages)
            if member == self.together - 1:
                pl.when(short)(lambda: self._end_group(turn))

        return [functools.partial(start, member) for member in range(self.together)]

    def _start_part_of_row(self, turn: jax.Array, slot: Scalar) -> None:
        number, done = self.ahead[_NUMBER], self.ahead[_DONE]
        row = self.plan.row(number)
        first, numbers_slot = self.first_of(turn), turn % self.depth
        at_once = self.pages_per_block

        @pl.when((number == first) & (done == 0))
        def _() -> None:
            self.fetcher.wait_for_numbers(first // self.together, numbers_slot)

        place = self._place(numbers_slot, number - first) + row.first_page + done
        self.fetcher.start_pages(place, jnp.minimum(row.pages - done, at_once), slot)
        self.ahead[_DONE] = done + at_once

        @pl.when(done + at_once >= row.pages)
        def _() -> None:
            self.ahead[_NUMBER] = number + 1
            self.ahead[_DONE] = 0
            last = (number + 1 == first + self.together) | (number + 1 >= self.active)
            pl.when(last)(lambda: self._end_group(turn))

    def _place(self, numbers_slot: Scalar, member: Scalar) -> Scalar:
        """The index of a row's first page number in the fetcher's `page_numbers`."""
        of_group = self.fetcher.page_table.shape[2]
        return numbers_slot * of_group + member * (of_group // self.together)

    def _end_group(self, turn: jax.Array) -> None:
        """Ends a group, and fetches a later group's page numbers instead."""
        self._start_numbers(turn + self.depth)
        self._advance_to(turn + 1)

    def _advance_to(self, turn: Scalar) -> None:
        self.ahead[_TURN] = turn
        self.ahead[_NUMBER] = self.first_of(turn)
        self.ahead[_DONE] = 0
