"""A stack of free page ids."""

from __future__ import annotations

import numpy as np

from sglang_jax.mem_cache.ledger import FREE, Owners, OwnershipError, PageLedger, Pages

_PAD = np.zeros(1, np.int32)


class PagePool:
    """Free pages of one kind. Page 0 is the pad page and is never handed out. `num_pages` includes it; `page_size`: in
    tokens.

    `alloc` and `free` are O(pages moved), without sorting or scanning. A double free is always detected; with a ledger,
    the error names the owner. Each page remembers its last position in the stack, and is free if the stack still has it
    there (the sparse sets of Briggs and Torczon 1993), so `alloc` does not have to mark pages.
    """

    def __init__(self, num_pages: int, page_size: int, ledger: PageLedger | None = None) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the pad page and at least one more, got num_pages={num_pages}")
        self.page_size = page_size
        self.total = num_pages - 1
        self.ledger = ledger
        self.num_free = self.total
        # The pad page is at the bottom of the stack, so it is always free.
        self._stack: Pages = np.concatenate((_PAD, np.arange(self.total, 0, -1, dtype=np.int32)))
        self._places: Pages = self._stack.copy()  # page p is at num_pages - p, and the pad page at 0
        # The same memory as a memoryview, where access to one number costs a third of that in an array.
        self._stack_numbers, self._place_numbers = self._stack.data, self._places.data

    def alloc(self, count: int, owner: int | Owners) -> Pages | None:
        """Takes `count` pages for `owner` (one code, or `[count]`); None, with nothing taken, if there are fewer."""
        if count > self.num_free:
            return None
        top = self.num_free + 1
        pages: Pages = self._stack[top - count : top].copy()
        self.num_free -= count
        if self.ledger is not None:
            self.ledger.move(pages, FREE, owner)
        return pages

    def free(self, pages: Pages, owner: int | Owners) -> None:
        """Returns `pages` `[pages]` of `owner` to the pool. Raises `OwnershipError` if a page is free already, is the
        pad page, or (with a ledger) is not the owner's."""
        if self.ledger is not None:
            self.ledger.move(pages, owner, FREE)
        if len(pages) == 1:
            self._free_one(int(pages[0]))
            return
        first, last = self.num_free + 1, self.num_free + 1 + len(pages)
        index = pages.astype(np.intp)  # otherwise numpy converts it at each use
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
        """Frees one page, as eviction does, without numpy, whose overhead is larger than the work."""
        last = self.num_free + 1
        before = self._place_numbers[page]
        if before < last and self._stack_numbers[before] == page:
            raise _double_free(np.array([page], np.int32))
        self._place_numbers[page] = last
        self._stack_numbers[last] = page
        self.num_free = last

    def free_pages(self) -> Pages:
        return self._stack[1 : self.num_free + 1]


def _double_free(pages: Pages) -> OwnershipError:
    return OwnershipError(f"double free, or free of the pad page, among pages {sorted(pages.tolist())}")
