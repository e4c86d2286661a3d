"""A stack of free page ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.ledger import FREE, Owners, OwnershipError, PageLedger, Pages

_TAKEN = -1


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
        # Each free page's place in the stack, `_TAKEN` of the others. The pad page is never taken, so never freed.
        self._places: NDArray[np.int32] = np.arange(num_pages - 1, -1, -1, dtype=np.int32)

    def alloc(self, count: int, owner: int | Owners) -> Pages | None:
        """Takes `count` pages for `owner` (one code or `[count]`), or none of them: then None."""
        if count > self.num_free:
            return None
        top = self.num_free
        pages: Pages = self._stack[top - count : top].copy()
        self.num_free = top - count
        self._places[pages.astype(np.intp)] = _TAKEN
        if self.ledger is not None:
            self.ledger.move(pages, FREE, owner)
        return pages

    def free(self, pages: Pages, owner: int | Owners) -> None:
        """Gives `pages` `[pages]` of `owner` back.

        **Raises:** `OwnershipError` if a page is free already, is the pad page, or (with a ledger) is not the owner's.
        """
        if self.ledger is not None:
            self.ledger.move(pages, owner, FREE)
        first, last = self.num_free, self.num_free + len(pages)
        index = pages.astype(np.intp)  # or numpy does so at each use
        if np.count_nonzero(self._places[index] != _TAKEN):
            raise _double_free(pages)
        places = np.arange(first, last, dtype=np.int32)
        self._places[index] = places
        if last - first > 1 and np.count_nonzero(self._places[index] != places):
            self._places[index] = _TAKEN
            raise _double_free(pages)
        self._stack[first:last] = pages
        self.num_free = last

    def free_pages(self) -> Pages:
        """The free pages `[free]`, for checks."""
        return self._stack[: self.num_free]


def _double_free(pages: Pages) -> OwnershipError:
    return OwnershipError(f"double free, or free of the pad page, among pages {sorted(pages.tolist())}")
