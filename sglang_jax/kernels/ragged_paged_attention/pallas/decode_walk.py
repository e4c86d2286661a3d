"""The walk of decode over its rows: which block of pages comes next, and the copies of those ahead of it.

Rows are taken in groups of a few that lie side by side. Where all rows of a group are short, their pages are one block
together: it is started and waited for at once, and what computes one row fills the time in which another's products
are on their way. Otherwise the rows are taken one by one, each in blocks of its own.
"""

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
"""What is started next: of which group (by its turn), and unless it is short, of which row, and how many of the row's
pages are started."""


@dataclass(frozen=True)
class Row:
    """The keys that a row sees are among the `length` that lie in page-table columns `first_page` and on, `pages` of
    them."""

    number: Scalar
    length: jax.Array
    first_page: Scalar
    pages: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """What a walk knows of the rows: int32 arrays, in a kernel references to them in scalar memory.

    - `lengths`, `pages`, `first_pages` `[R]`: of each row, see `Row`; 0 for rows that take no part. No `first_pages`
      where all are 0.
    - `groups` `[R / together]`: the pages of all rows of a group if it is short, else -1.
    """

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
        """For `rows` rows of which the first `num_decode` take part: what all layers of a step have in common."""
        kv_lens = jnp.pad(kv_lens, (0, rows - len(kv_lens)))
        kv_lens = jnp.where(jnp.arange(rows) < num_decode, kv_lens, 0)
        first_pages = None if window is None else jnp.maximum(kv_lens - window, 0) // page_size
        lengths = kv_lens if first_pages is None else kv_lens - first_pages * page_size
        pages = pl.cdiv(lengths, page_size)
        of_groups = pages.reshape(-1, together)
        short = (of_groups <= pages_of_short).all(axis=1)
        return Plan(lengths, pages, first_pages, jnp.where(short, of_groups.sum(axis=1), -1))

    def row(self, number: Scalar) -> Row:
        """One of the rows."""
        first_page = 0 if self.first_pages is None else self.first_pages[number]
        return Row(number, self.lengths[number], first_page, self.pages[number])


@dataclass(frozen=True)
class Walk:
    """The walk over the rows of a core, of which those below `active` take part, and their pages ahead of them.

    Groups count in the order in which the core comes to them: `turn` t begins with row `first_of(t)`. Cores take the
    programs of `at_once` rows in turn, so that all have as many rows whatever the bucket's padding.

    - `fetcher`: its page table has an entry for each group of `together` rows.
    - `ahead`: SMEM int32 `[AHEAD]`, the block whose copies are started next.
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
        """Blocks that there are buffers for, and groups whose page numbers are there or on their way: a group may be
        one block."""
        return self.fetcher.buffers.shape[0]

    @property
    def rows(self) -> int:
        """R."""
        return self.plan.lengths.shape[0]

    @property
    def together(self) -> int:
        """Rows of a group."""
        return self.groups.rows

    def first_of(self, turn: Scalar) -> Scalar:
        """The group's first row, by its place in the batch."""
        if self.cores > 1:
            groups = self.at_once // self.together
            turn = (turn // groups * self.cores + self.core) * groups + turn % groups
        return turn * self.together

    def begin(self) -> None:
        """Starts the copies that the first blocks wait for."""
        for turn in range(self.depth):
            self._start_numbers(turn)
        self._go_on_with(0)
        pl.loop(0, self.depth - 1)(self._start_next)

    def group(self, first: Scalar) -> list[Row]:
        """The rows of a group; those that take no part have no keys."""
        return [self.plan.row(first + member) for member in range(self.together)]

    def pages_of_group(self, first: Scalar) -> jax.Array:
        """Those of a group's rows if these share a block, else -1."""
        return self.plan.groups[first // self.together]

    def through_group(self, first: Scalar, slot: jax.Array) -> list[Callable[[], None]]:
        """Returns when the pages of a short group are in the buffer `slot`: what starts the copies of the next block,
        for whoever computes to call in between, a call for each row.

        Nothing that reads memory can be moved over the start of a copy, but what computes in registers can.
        """
        self.fetcher.wait_for_block(self.pages_of_group(first), slot)
        free = (slot + self.depth - 1) % self.depth
        turn = self.ahead[_TURN]
        there, short = self._is_there(turn), self._is_short(turn)
        pl.when(there & jnp.logical_not(short))(lambda: self._start_part_of_row(turn, free))
        return self._starts_of_group(turn, free, short)

    def through_row(
        self, number: Scalar, first_slot: jax.Array, attend: Callable[[jax.Array, jax.Array], None]
    ) -> jax.Array:
        """Calls `attend` with each block of a row when it is there, with the next ones on their way: the number of the
        row's keys from the block on, and its buffer; the first is in `first_slot`. Returns the buffer of the block that
        comes next.

        A row without keys has one block without pages: whoever looks for the next block need not skip it.
        """
        fetcher, row = self.fetcher, self.plan.row(number)
        blocks = jnp.maximum(pl.cdiv(row.pages, self.pages_per_block), 1)

        @pl.loop(0, blocks)
        def _(block: jax.Array) -> None:
            slot = (first_slot + block) % self.depth
            # The buffer of the block before this one, with which all is done.
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

    def _is_there(self, turn: Scalar) -> jax.Array:
        return self.first_of(turn) < self.active

    def _is_short(self, turn: Scalar) -> jax.Array:
        """Whether there is such a group, and its rows share a block."""
        return self._is_there(turn) & (self.pages_of_group(jnp.minimum(self.first_of(turn), self.rows - 1)) >= 0)

    def _start_next(self, slot: Scalar) -> None:
        """Starts the copies of the next block, if there is one, into a buffer."""
        turn = self.ahead[_TURN]
        there = self._is_there(turn)
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

        self._leave(turn)

    def _starts_of_group(self, turn: jax.Array, slot: Scalar, short: jax.Array) -> list[Callable[[], None]]:
        """As `_start_group`, if it is short: a call for each row, without branches."""
        first, numbers_slot = jnp.minimum(self.first_of(turn), self.rows - self.together), turn % self.depth
        pl.when(short)(lambda: self.fetcher.wait_for_numbers(first // self.together, numbers_slot))

        def start(member: int) -> None:
            row = self.plan.row(first + member)
            place = self._place(numbers_slot, member) + row.first_page
            pages = jnp.where(short, row.pages, 0)
            self.fetcher.start_few_pages(place, pages, slot, member * self.groups.pages, self.groups.pages)
            if member == self.together - 1:
                pl.when(short)(lambda: self._leave(turn))

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
            pl.when(last)(lambda: self._leave(turn))

    def _place(self, numbers_slot: Scalar, member: Scalar) -> Scalar:
        """Where the page numbers of a group's row begin."""
        of_group = self.fetcher.page_table.shape[2]
        return numbers_slot * of_group + member * (of_group // self.together)

    def _leave(self, turn: jax.Array) -> None:
        """The numbers of the group are no longer needed: those of a later one take their place."""
        self._start_numbers(turn + self.depth)
        self._go_on_with(turn + 1)

    def _go_on_with(self, turn: Scalar) -> None:
        self.ahead[_TURN] = turn
        self.ahead[_NUMBER] = self.first_of(turn)
        self.ahead[_DONE] = 0
