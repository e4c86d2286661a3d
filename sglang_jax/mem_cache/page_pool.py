"""A stack of free page ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.ledger import FREE, Owners, OwnershipError, PageLedger, Pages

_HELD = -1
"""The place of a page that is not free."""


class PagePool:
    """Free pages of one kind. Page 0 is the pad page and is never handed out.

    `alloc` and `free` are O(pages moved): no sort, no scan. A page that is freed twice is always noticed; who owned it
    is known with a ledger.

    **Arguments:** `num_pages` counts the pad page; `page_size` in tokens; `ledger` records owners in debug mode.
    """

    def __init__(self, num_pages: int, page_size: int, ledger: PageLedger | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the pad page and at least one more, got num_pages={num_pages}")
        self.page_size = page_size
        self.total = num_pages - 1
        self.ledger = ledger
        self._stack: Pages = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self.num_free = self.total
        # Where each free page lies in the stack. The pad page has a place as well, so that nobody can free it.
        self._places: NDArray[np.int32] = np.arange(num_pages - 1, -1, -1, dtype=np.int32)

    def alloc(self, count: int, owner: int | Owners) -> Pages | None:
        """Takes `count` pages for `owner` (one code or `[count]`), or none of them: then None."""
        if count > self.num_free:
            return None
        top = self.num_free
        pages: Pages = self._stack[top - count : top].copy()
        self.num_free = top - count
        self._places[pages.astype(np.intp)] = _HELD
        if self.ledger is not None:
            self.ledger.move(pages, FREE, owner)
        return pages

    def free(self, pages: Pages, owner: int | Owners) -> None:
        """Gives `pages` `[pages]` of `owner` back.

        **Raises:** `OwnershipError` if a page is free already, is the pad page, or (with a ledger) is not the owner's.
        """
        if self.ledger is not None:
            self.ledger.move(pages, owner, FREE)
        self._put_back(pages)

    def free_runs(self, runs: list[Pages], owners: list[int]) -> None:
        """As `free`, for runs of pages, each with its owner."""
        if self.ledger is not None:
            self.ledger.move(np.concatenate(runs), np.repeat(owners, [len(run) for run in runs]), FREE)
        self._put_back(np.concatenate(runs))

    def free_pages(self) -> Pages:
        """The free pages `[free]`, for checks."""
        return self._stack[: self.num_free]

    def _put_back(self, pages: Pages) -> None:
        count, index = len(pages), pages.astype(np.intp)
        places = np.arange(self.num_free, self.num_free + count, dtype=np.int32)
        if (self._places[index] != _HELD).any():
            raise _double_free(pages)
        self._places[index] = places
        if (self._places[index] != places).any():  # one of them is there twice
            self._places[index] = _HELD
            raise _double_free(pages)
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count


def _double_free(pages: Pages) -> OwnershipError:
    return OwnershipError(f"double free, or free of the pad page, among pages {sorted(pages.tolist())}")
