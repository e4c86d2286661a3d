"""The page table: the pages of each row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.ledger import Pages
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.runner.plan import Int32, PageDeltas

_NOTHING = np.zeros(0, np.int32)
_NOWHERE: Index = np.zeros(0, np.intp)
NO_DELTAS = PageDeltas(_NOTHING, _NOTHING, _NOTHING)


class PageTable:
    """The host's table `[rows, max_pages]` of page ids, and the entries that changed since the last step. The runner
    has a copy and receives only the changes. The columns that a prompt takes are recorded as a run: an index for each
    of thousands of pages would cost more than the pages."""

    def __init__(self, rows: int, max_pages: int) -> None:
        self.pages: NDArray[np.int32] = np.zeros((rows, max_pages), np.int32)
        self._runs: dict[int, tuple[int, int]] = {}
        self._spots: list[tuple[Index, Index]] = []
        self._stamps: Int32 = np.zeros(rows * max_pages, np.int32)
        self._columns: Int32 = np.arange(max_pages, dtype=np.int32)
        self._columns.setflags(write=False)

    def write(self, rows: Index, columns: Index, pages: Pages) -> None:
        """Sets `pages[i]` at `(rows[i], columns[i])`, each place once. Keeps the two index arrays: do not change
        them."""
        self.pages[rows, columns] = pages
        self._spots.append((rows, columns))

    def write_run(self, row: int, first: int, pages: Pages) -> None:
        last = first + len(pages)
        self.pages[row, first:last] = pages
        begun, reached = self._runs.get(row, (first, first))
        if reached == first:
            self._runs[row] = (begun, last)
        else:
            self._spots.append(self._places({row: (first, last)}))

    def run(self, row: int, first: int, last: int) -> Pages:
        """A copy of the pages in columns `[first, last)` of a row."""
        return self.pages[row, first:last].copy()

    def take_out(self, rows: Index, columns: Index) -> Pages:
        """Returns the pages at `(rows[i], columns[i])` and clears these entries, like `clear`."""
        pages: Pages = self.pages[rows, columns]
        self.pages[rows, columns] = 0
        return pages

    def clear(self, row: int, columns: int) -> None:
        """Clears the first `columns` columns of a row. The runner, which does not read rows outside a plan, does not
        need this."""
        self.pages[row, :columns] = 0
        self._runs.pop(row, None)

    def take_deltas(self) -> PageDeltas:
        """The entries written since the last call, each once, with their newest values, except those of cleared
        rows."""
        runs, spots = self._runs, self._spots
        if not runs and not spots:
            return NO_DELTAS
        self._runs, self._spots = {}, []
        if runs and self._overlap(runs, spots):
            spots.append(self._places(runs))
            runs = {}
        rows, columns, pages = self._values(*(spots[0] if len(spots) == 1 else self._each_once(spots)), runs)
        if np.count_nonzero(pages) < len(pages):
            rows, columns, pages = rows[pages > 0], columns[pages > 0], pages[pages > 0]
        return PageDeltas(rows, columns, pages)

    def _values(self, rows: Index, columns: Index, runs: dict[int, tuple[int, int]]) -> tuple[Int32, Int32, Int32]:
        if not runs:
            return rows.astype(np.int32), columns.astype(np.int32), self.pages[rows, columns]
        place = len(rows)
        values = np.empty((3, place + sum([last - first for first, last in runs.values()])), np.int32)
        if place:
            values[0, :place], values[1, :place], values[2, :place] = rows, columns, self.pages[rows, columns]
        for row, (first, last) in runs.items():
            run = slice(place, place := place + last - first)
            values[0, run], values[1, run], values[2, run] = row, self._columns[first:last], self.pages[row, first:last]
        return values[0], values[1], values[2]

    def _overlap(self, runs: dict[int, tuple[int, int]], spots: list[tuple[Index, Index]]) -> bool:
        if all(runs.keys().isdisjoint(rows.tolist()) for rows, _ in spots):
            return False
        first, last = np.zeros((2, len(self.pages)), np.intp)
        rows = list(runs)
        first[rows], last[rows] = np.array(list(runs.values())).T
        return any(((first[rows] <= columns) & (columns < last[rows])).any() for rows, columns in spots)

    def _each_once(self, spots: list[tuple[Index, Index]]) -> tuple[Index, Index]:
        """The places without repetitions, in linear time, without sorting."""
        if not spots:
            return _NOWHERE, _NOWHERE
        rows, columns = _join(spots)
        flat = rows * self.pages.shape[1] + columns
        order = np.arange(len(flat), dtype=np.int32)
        self._stamps[flat] = order
        newest = self._stamps[flat] == order
        return rows[newest], columns[newest]

    def _places(self, runs: dict[int, tuple[int, int]]) -> tuple[Index, Index]:
        rows = np.array(list(runs)).repeat([last - first for first, last in runs.values()])
        columns = np.concatenate([self._columns[first:last] for first, last in runs.values()])
        return rows, columns.astype(np.intp)


def _join(places: list[tuple[Index, Index]]) -> tuple[Index, Index]:
    return np.concatenate([rows for rows, _ in places]), np.concatenate([columns for _, columns in places])
