"""Which page holds which run of a row's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.ledger import Pages
from sglang_jax.runner.plan import Int32, PageDeltas

_NOTHING = np.zeros(0, np.int32)
NO_DELTAS = PageDeltas(_NOTHING, _NOTHING, _NOTHING)


class PageTable:
    """Host table `[rows, max_pages]` of page ids, and the entries that changed since the last step.

    The runner keeps a copy and is sent the changes alone.
    """

    def __init__(self, rows: int, max_pages: int) -> None:
        self.pages: NDArray[np.int32] = np.zeros((rows, max_pages), np.int32)
        self._changed: list[Int32] = []
        self._stamps: Int32 = np.zeros(rows * max_pages, np.int32)

    def write(self, rows: Int32, columns: Int32, pages: Pages) -> None:
        """Sets `pages[i]` at `(rows[i], columns[i])`."""
        self.pages[rows, columns] = pages
        self._changed.append(rows * np.int32(self.pages.shape[1]) + columns)

    def write_run(self, row: int, first: int, pages: Pages) -> None:
        """Sets a run of one row's columns, from column `first` on."""
        self.pages[row, first : first + len(pages)] = pages
        start = row * self.pages.shape[1] + first
        self._changed.append(np.arange(start, start + len(pages), dtype=np.int32))

    def run(self, row: int, first: int, last: int) -> Pages:
        """Pages of columns `[first, last)` of a row, a copy."""
        return self.pages[row, first:last].copy()

    def take_out(self, rows: Int32, columns: Int32) -> Pages:
        """Pages at `(rows[i], columns[i])`, which are forgotten, as by `clear`."""
        pages: Pages = self.pages[rows, columns]
        self.pages[rows, columns] = 0
        return pages

    def clear(self, row: int, columns: int) -> None:
        """Forgets a row, of which the first `columns` columns are in use. The runner is not told: a row that is not in
        a plan is not read."""
        self.pages[row, :columns] = 0

    def take_deltas(self) -> PageDeltas:
        """The entries written since the last call, each once, with their newest values; none of rows freed since."""
        if not self._changed:
            return NO_DELTAS
        flat = self._changed[0] if len(self._changed) == 1 else self._each_once(np.concatenate(self._changed))
        self._changed.clear()
        pages = self.pages.reshape(-1)[flat]
        if not pages.all():
            flat, pages = flat[pages > 0], pages[pages > 0]
        rows, columns = np.divmod(flat, np.int32(self.pages.shape[1]))
        return PageDeltas(rows, columns, pages)

    def _each_once(self, flat: Int32) -> Int32:
        """The entries `[written]` without repetitions, in time that follows their number alone: no sort."""
        order = np.arange(len(flat), dtype=np.int32)
        self._stamps[flat] = order
        newest: Int32 = flat[self._stamps[flat] == order]
        return newest
