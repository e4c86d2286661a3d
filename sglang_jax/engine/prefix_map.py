"""Estimates what a replica has in its prefix cache, from the requests that were sent to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.component import Component, Passed
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.ledger import Pages
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace, Node, RadixTree


class PrefixMap:
    """Prompts that were sent to one replica, in the same tree as the replica's cache, without KV. It holds `capacity`
    tokens, as many as the replica's pool, and like the replica evicts the least recently used first. It does not see
    outputs, nor how much of the pool running requests occupy. That is good enough for routing."""

    def __init__(self, page_size: int, capacity: int) -> None:
        self._pages = _CountedPages()
        self._tree = RadixTree(page_size, (self._pages,))
        self._capacity = max(capacity // page_size, 1)

    @property
    def num_tokens(self) -> int:
        return self._pages.evictable * self._tree.page_size

    def match(self, tokens: bytes, namespace: Namespace) -> int:
        """Returns how many tokens at the front of a prompt (int32 bytes) the replica has seen, in whole pages."""
        return self._tree.probe(tokens, namespace).length

    def add(self, tokens: bytes, namespace: Namespace) -> None:
        """Adds a prompt that is sent to the replica; only its front if it is longer than the capacity."""
        page_bytes = self._tree.page_size * TOKEN_BYTES
        pages = min(len(tokens) // page_bytes, self._capacity)
        if pages == 0:
            return
        run = np.zeros(pages, np.int32)
        inserted = self._tree.insert(self._tree.root(namespace), tokens[: pages * page_bytes], (run,), 0)
        self._tree.join_path(inserted.node, pages - inserted.already_there // self._tree.page_size)
        self._tree.unlock(inserted.node)
        self._tree.evict(self._pages, self._pages.evictable - self._capacity)


class _CountedPages(Component):
    """A component that only counts pages: all can be evicted at any time, the least recently used leaf first. Nodes
    have no value, because a node's key determines its number of pages. Locks are held only during an insert."""

    complete = True

    def __init__(self) -> None:
        super().__init__(EvictionOrder(EvictionPolicy.LRU))

    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        self.evictable += len(pages)

    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """Does nothing: no node lacks a page."""

    def split(self, upper: Node, lower: Node) -> None:
        """Does nothing: a node has no value to split."""

    def may_join(self, upper: Node, lower: Node) -> bool:
        return True

    def join(self, upper: Node, lower: Node) -> None:
        """See `split`."""

    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        return index

    def accepts_end(self, node: Node) -> bool:
        return True

    def pin(self, node: Node) -> None:
        self.order.discard(node)

    def unpin(self, node: Node) -> None:
        self.touch(node)

    def session_begins(self, node: Node) -> None:
        """Does nothing: no session depends on the map."""

    def session_ends(self, node: Node) -> None:
        """As `session_begins`."""

    def set_spare(self, node: Node, spare: bool) -> None:
        """As `session_begins`."""

    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        return 0

    def cut_off(self, node: Node) -> None:
        self.remove(node)

    def remove(self, node: Node) -> None:
        self.order.discard(node)
        self.evictable -= node.length

    def trim(self, node: Node, pages: int) -> bool:
        self.evictable -= node.length - pages
        return True

    def evict_at(self, node: Node, wanted: int) -> int:
        return max(node.length - wanted, 0)

    def touch(self, node: Node) -> None:
        if node.children:
            self.order.discard(node)
        else:
            self.order.add(node)

    def give_back(self) -> None:
        """Does nothing: there is no memory to free."""
