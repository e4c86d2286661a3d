"""Items ordered by a key, lowest first, most of which are removed from the front."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[float, ...]

_ITEM = itemgetter(1)

_EMPTY: Any = None


class Order(Generic[Item]):
    """A sorted list of items with distinct keys, so that items are never compared. An item removed from the front
    leaves an empty place; these are deleted when they outnumber the items."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Item]] = []
        self._begin = 0

    def __len__(self) -> int:
        return len(self._entries) - self._begin

    def add(self, key: Key, item: Item) -> None:
        if not len(self) or self._entries[-1][0] < key:
            self._entries.append((key, item))
        else:
            insort(self._entries, (key, item), self._begin)

    def remove(self, key: Key, item: Item) -> None:
        entries, begin = self._entries, self._begin
        place = begin if entries[begin][1] is item else bisect_left(entries, (key,), begin)
        assert entries[place][1] is item
        if place > begin:
            del entries[place]
            return
        entries[begin] = _EMPTY
        self._begin += 1
        if 2 * self._begin > len(entries):
            del entries[: self._begin]
            self._begin = 0

    def head(self) -> Item:
        """The first item, which must exist."""
        return self._entries[self._begin][1]

    def lowest(self) -> Key:
        """The key of the first item, which must exist."""
        return self._entries[self._begin][0]

    def first(self, count: int) -> Iterator[Item]:
        """The first `count` items, as of now."""
        return map(_ITEM, self._entries[self._begin : self._begin + count])
