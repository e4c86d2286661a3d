"""Copies of pages from HBM to vector memory.

Both attention kernels process blocks of keys, each a fixed number of pages of one sequence. Buffers rotate, two of
prefill's and four to eight of decode's: one block is computed while the pages of the next ones arrive. Scalar memory
holds the page numbers of only as many sequences, so that it bounds neither the number of requests nor, in practice,
their length. Each started copy is waited for exactly once, with the same number of pages; a block without pages needs
neither.

The kernels are compiled without address checks, which take as long as starting a copy: a runner refuses plans with
pages outside a pool, the interpreter checks each access, and `--debug-memory` compiles checks in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any
"""A Pallas reference to memory; its type is not public."""

_STARTED_TOGETHER = 4
"""Copies whose addresses are computed together; one by one, small pages would wait for the scalar unit."""

Scalar = jax.Array | int


@dataclass(frozen=True)
class PageFetcher:
    """The copies of one kernel call.

    - `kv_pages`: HBM `[num_pages, kv_heads, parts, page_size, lanes]`.
    - `page_table`: HBM int32 `[rows, 1, columns]`; a row by itself is contiguous.
    - `buffers`: VMEM `[depth, pages_per_block, kv_heads, parts, page_size, lanes]`.
    - `page_numbers`: SMEM int32 `[n * columns]` or more: those of `n` rows, consecutive. Not a table: its addresses
      take five more operations per page, and copies wait for the scalar unit.
    - `kv_arrived`, `numbers_arrived`: DMA semaphores `[depth]` and `[n]`.
    """

    kv_pages: Ref
    page_table: Ref
    buffers: Ref
    page_numbers: Ref
    kv_arrived: Ref
    numbers_arrived: Ref

    @property
    def pages_per_block(self) -> int:
        return self.buffers.shape[1]

    @property
    def page_size(self) -> int:
        return self.buffers.shape[4]

    def start_numbers(self, row: Scalar, slot: Scalar) -> None:
        """Starts fetching a row's page numbers into one of the `n` slots."""
        self._numbers(row, slot).start()

    def wait_for_numbers(self, row: Scalar, slot: Scalar) -> None:
        self._numbers(row, slot).wait()

    def _numbers(self, row: Scalar, slot: Scalar) -> Any:
        columns = self.page_table.shape[2]
        numbers = self.page_numbers.at[pl.ds(pl.multiple_of(slot * columns, 128), columns)]
        return pltpu.make_async_copy(self.page_table.at[row, 0], numbers, self.numbers_arrived.at[slot])

    def start_block(self, numbers_slot: Scalar, first: Scalar, count: Scalar, slot: Scalar, place: Scalar = 0) -> None:
        """Starts copying `count` pages of a row, from page-table column `first` on, into a buffer from its page `place`
        on."""
        self.start_pages(numbers_slot * self.page_table.shape[2] + first, count, slot, place)

    def start_pages(self, place: Scalar, count: Scalar, slot: Scalar, first: Scalar = 0) -> None:
        """Starts copying `count` pages, whose numbers start at `place`, into a buffer from its page `first` on."""

        def start(index: Scalar, member: int = 0) -> None:
            page = self.page_numbers[(place + index) + member]
            buffer = self.buffers.at[slot, index + (first + member)]
            pltpu.make_async_copy(self.kv_pages.at[page], buffer, self.kv_arrived.at[slot]).start()

        @pl.loop(0, count // _STARTED_TOGETHER)
        def _(group: jax.Array) -> None:
            for member in range(_STARTED_TOGETHER):
                start(group * _STARTED_TOGETHER, member)

        pl.loop(count // _STARTED_TOGETHER * _STARTED_TOGETHER, count)(start)

    def start_few_pages(self, place: Scalar, count: Scalar, slot: Scalar, first: int, most: int) -> None:
        """As `start_pages` for up to `most` pages, unrolled: each copy is a few predicated operations. It reads `most`
        page numbers whatever `count` is, so `page_numbers` must extend past the last row's."""
        for index in range(most):
            page = self.page_numbers[place + index]
            copy = pltpu.make_async_copy(
                self.kv_pages.at[page], self.buffers.at[slot, first + index], self.kv_arrived.at[slot]
            )
            pl.when(index < count)(copy.start)

    def wait_for_block(self, count: Scalar, slot: Scalar) -> None:
        """Waits until the `count` pages that were started for a buffer have arrived: a semaphore counts bytes, so one
        wait covers all."""
        buffer = self.buffers.at[slot, pl.ds(0, count)]
        pl.when(count > 0)(pltpu.make_async_copy(buffer, buffer, self.kv_arrived.at[slot]).wait)

    def clear_values_from(self, length: Scalar, slot: Scalar, pages: int) -> None:
        """Zeroes the values after the first `length` slots of a block's first `pages` pages. Their weights are zero,
        but unwritten memory may be NaN, and zero times NaN is NaN."""
        partial = length // self.page_size
        self.clear_values_of(slot, jnp.minimum(partial, pages - 1), length - partial * self.page_size)
        self.clear_pages_of_values(slot, partial + 1, pages)

    def clear_pages_of_values(self, slot: Scalar, first: Scalar, last: Scalar) -> None:
        """Zeroes the values of the pages `first` to `last` (exclusive)."""
        values = self.buffers.shape[3] - 1

        @pl.loop(first, last)
        def _(page: jax.Array) -> None:
            for head in range(self.buffers.shape[2]):
                self.buffers[slot, page, head, values] = jnp.zeros(self.buffers.shape[4:], self.buffers.dtype)

    def clear_values_of(self, slot: Scalar, page: Scalar, length: Scalar) -> None:
        """Zeroes the values of one page after its first `length` slots."""
        values = self.buffers.shape[3] - 1
        for head in range(self.buffers.shape[2]):
            found = self.buffers[slot, page, head, values]
            offsets = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
            self.buffers[slot, page, head, values] = jnp.where(offsets < length, found, jnp.zeros_like(found))
