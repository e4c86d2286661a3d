"""The order of eviction: a heap that lives as long as the tree."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_jax.config import EvictionPolicy

if TYPE_CHECKING:
    from sglang_jax.mem_cache.radix_tree import Node

Score = tuple[int, int]


def _least_recently_used(node: Node) -> Score:
    return (node.last_access, node.id)


def _least_frequently_used(node: Node) -> Score:
    return (node.hits, node.last_access)


def _first_in(node: Node) -> Score:
    return (node.created, node.id)


_SCORES: dict[EvictionPolicy, Callable[[Node], Score]] = {
    EvictionPolicy.LRU: _least_recently_used,
    EvictionPolicy.LFU: _least_frequently_used,
    EvictionPolicy.FIFO: _first_in,
}


_WAITING = 0
"""The stamp of a node without an entry in the heap."""

_MAX_WAITING = 32


class EvictionOrder:
    """Nodes that may be evicted, lowest score (`score`, or the policy's) first.

    Only a node's newest heap entry counts. Stale entries are skipped when they surface, and removed when they outnumber
    the live ones, so each call is O(log n) amortised. Scores only grow: one that grew since the node was added is
    noticed when its entry surfaces. New nodes wait outside the heap at first, since most are removed again at once: an
    insert creates a leaf, which its request then locks.
    """

    def __init__(self, policy: EvictionPolicy, score: Callable[[Node], Score] | None = None) -> None:
        self._score = score or _SCORES[policy]
        self._heap: list[tuple[Score, int, Node]] = []
        self._live: dict[int, int] = {}
        self._waiting: dict[int, Node] = {}
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: Node) -> bool:
        return node.id in self._live

    def add(self, node: Node) -> None:
        """Adds a node, if it is not in the order."""
        if node.id not in self._live:
            self._live[node.id] = _WAITING
            self._waiting[node.id] = node
            if len(self._waiting) >= _MAX_WAITING:
                self._push_waiting()

    def _push_waiting(self) -> None:
        for node in self._waiting.values():
            self._push(node)
        self._waiting.clear()

    def _push(self, node: Node) -> None:
        self._stamp += 1
        self._live[node.id] = self._stamp
        heapq.heappush(self._heap, (self._score(node), self._stamp, node))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2].id) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Removes a node, if it is in the order."""
        if self._live.pop(node.id, None) == _WAITING:
            del self._waiting[node.id]

    def first(self) -> Node | None:
        """The next node to evict, which stays in the order; None if there is none."""
        if self._waiting:
            self._push_waiting()
        while self._heap:
            score, stamp, node = self._heap[0]
            if self._live.get(node.id) != stamp:
                heapq.heappop(self._heap)
            elif self._score(node) != score:
                heapq.heappop(self._heap)
                self._push(node)
            else:
                return node
        return None
