"""A stack of free page ids."""

from __future__ import annotations

import numpy as np

from sglang_jax.mem_cache.ledger import FREE, Owners, OwnershipError, PageLedger, Pages

_PAD = np.zeros(1, np.int32)


class PagePool:
    """Free pages of one kind. Page 0 is the pad page and is never handed out.

    `alloc` and `free` are O(pages moved): no sort, no scan. A page that is freed twice is always noticed; who owned it
    is known with a ledger. Each page remembers where in the stack it was last: it is free if the stack is that high,
    and has the page there (the sparse sets of Briggs and Torczon 1993), so that taking pages marks none of them.

    **Arguments:** `num_pages` counts the pad page; `page_size` in tokens; `ledger` records owners in debug mode.
    """

    def __init__(self, num_pages: int, page_size: int, ledger: PageLedger | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the pad page and at least one more, got num_pages={num_pages}")
        self.page_size = page_size
        self.total = num_pages - 1
        self.ledger = ledger
        self.num_free = self.total
        # The pad page lies below all others, so that it is free for ever.
        self._stack: Pages = np.concatenate((_PAD, np.arange(self.total, 0, -1, dtype=np.int32)))
        self._places: Pages = self._stack.copy()  # page p lies at num_pages - p, and the pad page at 0
        # The same memory: one number costs a third there of what it does in an array.
        self._stack_numbers, self._place_numbers = self._stack.data, self._places.data

    def alloc(self, count: int, owner: int | Owners) -> Pages | None:
        """Takes `count` pages for `owner` (one code or `[count]`), or none of them: then None."""
        if count > self.num_free:
            return None
        top = self.num_free + 1
        pages: Pages = self._stack[top - count : top].copy()
        self.num_free -= count
        if self.ledger is not None:
            self.ledger.move(pages, FREE, owner)
        return pages

    def free(self, pages: Pages, owner: int | Owners) -> None:
        """Gives `pages` `[pages]` of `owner` back.

        **Raises:** `OwnershipError` if a page is free already, is the pad page, or (with a ledger) is not the owner's.
        """
        if self.ledger is not None:
            self.ledger.move(pages, owner, FREE)
        if len(pages) == 1:
            self._free_one(int(pages[0]))
            return
        first, last = self.num_free + 1, self.num_free + 1 + len(pages)
        index = pages.astype(np.intp)  # or numpy does so at each use
        before = self._places[index]
        low = before < first
        if np.count_nonzero(low) and np.count_nonzero(self._stack[before[low]] == pages[low]):
            raise _double_free(pages)
        places = np.arange(first, last, dtype=np.int32)
        self._places[index] = places
        if np.count_nonzero(self._places[index] != places):
            raise _double_free(pages)
        self._stack[first:last] = pages
        self.num_free = last - 1

    def _free_one(self, page: int) -> None:
        """As `free`, of what costs numpy more than it is worth: eviction frees a page at a time."""
        last = self.num_free + 1
        before = self._place_numbers[page]
        if before < last and self._stack_numbers[before] == page:
            raise _double_free(np.array([page], np.int32))
        self._place_numbers[page] = last
        self._stack_numbers[last] = page
        self.num_free = last

    def free_pages(self) -> Pages:
        """The free pages `[free]`, for checks."""
        return self._stack[1 : self.num_free + 1]


def _double_free(pages: Pages) -> OwnershipError:
    return OwnershipError(f"double free, or free of the pad page, among pages {sorted(pages.tolist())}")
