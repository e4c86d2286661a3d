"""A window over waiting work that groups items with a shared prefix."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

_BORDER_SEARCH = 32
"""Entries on either side of a new starting point that are searched for a border between two groups."""


_Place = tuple[bytes, int]
"""Key and number of an item, which define its position; numbers are unique."""

_Entry = tuple[bytes, int, int, Item]


class Lookahead(Generic[Item]):
    """A window of waiting items. Items whose keys share a prefix are taken one after the other.

    A taker sweeps through the window in the order of keys, then starts again from the front. Items that arrive ahead of
    the sweep join it; those that arrive behind it wait for the next one. This is replacement selection (Knuth, The Art
    of Computer Programming, volume 3, section 5.4.1): the sorted runs are about twice as long as the window. Equal keys
    are ordered by number.

    With several takers, each sweeps separately. An item belongs to the taker whose last item's key shares the longest
    prefix with its own. A taker that meets an item of another taker moves to the middle of the widest range without
    takers. So a group with a shared prefix goes to one taker, unless another taker has nothing else left.

    - `max_items`, `max_bytes`: capacity of the window; an empty window also takes an item that is larger.
    - `reorder`: False returns items in the order of arrival.
    """

    def __init__(self, max_items: int, max_bytes: int, *, reorder: bool = True) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._bytes = 0
        self._arrived: deque[_Entry[Item]] | None = None if reorder else deque()
        self._sorted: list[_Entry[Item]] = []
        self._last: dict[int, _Place] = {}

    def __len__(self) -> int:
        return len(self._sorted) if self._arrived is None else len(self._arrived)

    @property
    def full(self) -> bool:
        return len(self) >= self._max_items or self._bytes >= self._max_bytes

    def push(self, item: Item, *, key: bytes, number: int, size: int) -> None:
        """Adds an item with a unique `number`. The caller checks `full` first."""
        entry = (key, number, size, item)
        self._bytes += size
        if self._arrived is None:
            bisect.insort(self._sorted, entry)
        else:
            self._arrived.append(entry)

    def take(self, taker: int = 0) -> Item | None:
        if not len(self):
            return None
        entry = self._arrived.popleft() if self._arrived is not None else self._take_sorted(taker)
        _, _, size, item = entry
        self._bytes -= size
        return item

    def forget(self, taker: int) -> None:
        """Forgets a taker that has left, or lost its cache: no item belongs to it any more."""
        self._last.pop(taker, None)

    def _take_sorted(self, taker: int) -> _Entry[Item]:
        position = self._ahead_of(self._last.get(taker))
        if self._belongs_to_another(self._sorted[position], taker):
            position = self._far_from_others(taker)
        entry = self._sorted.pop(position)
        self._last[taker] = entry[:2]
        return entry

    def _ahead_of(self, last: _Place | None) -> int:
        if last is None:
            return 0
        key, number = last
        position = bisect.bisect_left(self._sorted, (key, number + 1))
        return position if position < len(self._sorted) else 0

    def _belongs_to_another(self, entry: _Entry[Item], taker: int) -> bool:
        if len(self._last) < 2 and taker in self._last:
            return False
        key = entry[0]
        shared = {other: shared_length(last_key, key) for other, (last_key, _) in self._last.items()}
        own = shared.pop(taker, -1)
        return max(shared.values(), default=-1) > own

    def _far_from_others(self, taker: int) -> int:
        """The border between two groups that is nearest to the middle of the widest range between the other takers."""
        count = len(self._sorted)
        places = sorted(self._ahead_of(last) for other, last in self._last.items() if other != taker)
        ends = [*places[1:], places[0] + count]
        start, end = max(zip(places, ends, strict=True), key=lambda stretch: stretch[1] - stretch[0])
        middle = (start + end) // 2
        first, last = max(start + 1, middle - _BORDER_SEARCH), min(end - 1, middle + _BORDER_SEARCH)
        near = sorted(range(first, last + 1), key=lambda position: abs(position - middle))
        return min(near, key=self._shared_with_previous, default=middle) % count

    def _shared_with_previous(self, position: int) -> int:
        count = len(self._sorted)
        return shared_length(self._sorted[(position - 1) % count][0], self._sorted[position % count][0])


def shared_length(one: bytes, other: bytes) -> int:
    """Returns the length of the longest common prefix, in bytes."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    known, differs = 0, most  # equal up to `known`, not up to `differs`
    while differs - known > 1:
        middle = (known + differs) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            differs = middle
    return known
