"""A stack of free page ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.ledger import FREE, Owners, OwnershipError, PageLedger, Pages


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
        self._is_free: NDArray[np.bool_] = np.ones(num_pages, np.bool_)
        self._is_free[0] = False
        self._stamps: NDArray[np.int64] = np.zeros(num_pages, np.int64)

    def alloc(self, count: int, owner: int | Owners) -> Pages | None:
        """Takes `count` pages for `owner` (one code or `[count]`), or none of them: then None."""
        if count > self.num_free:
            return None
        top = self.num_free
        pages: Pages = self._stack[top - count : top].copy()
        self.num_free = top - count
        self._is_free[pages] = False
        if self.ledger is not None:
            self.ledger.move(pages, FREE, owner)
        return pages

    def free(self, pages: Pages, owner: int | Owners) -> None:
        """Gives `pages` `[pages]` of `owner` back.

        **Raises:** `OwnershipError` if a page is free already, is the pad page, or (with a ledger) is not the owner's.
        """
        count = len(pages)
        if self.ledger is not None:
            self.ledger.move(pages, owner, FREE)
        stamps = np.arange(count)
        self._stamps[pages] = stamps
        if self._is_free[pages].any() or (pages == 0).any() or (self._stamps[pages] != stamps).any():
            raise OwnershipError(f"double free, or free of the pad page, among pages {sorted(pages.tolist())}")
        self._is_free[pages] = True
        self._stack[self.num_free : self.num_free + count] = pages
        self.num_free += count

    def free_pages(self) -> Pages:
        """The free pages `[free]`, for checks."""
        return self._stack[: self.num_free]
