"""Full attention: every node holds one page id per page of its key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.component import Component
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.ledger import Pages, node_owner
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.radix_tree import Node, RadixTree


@dataclass(slots=True)
class FullPages:
    """A node's `pages` `[pages of its key]`, and how many requests depend on them."""

    pages: Pages
    locks: int = 0


class FullKV(Component):
    """Pages of full attention.

    - A split divides the pages; both halves keep the number of locks.
    - A match may end at any page.
    - A lock covers every node up to the root; so a node without locks has none below it either.
    - Unlocked leaves are evicted by the policy, from their tail, and only as many pages as are short.
    """

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.order = EvictionOrder(policy)
        self._evictable = 0
        self._protected = 0
        self._given_up: list[Pages] = []
        self._given_up_by: list[int] = []

    @property
    def evictable(self) -> int:
        return self._evictable

    @property
    def protected(self) -> int:
        return self._protected

    def attach(self, tree: RadixTree) -> None:
        self._tree = tree
        self._index = tree.components.index(self)

    def held(self, node: Node) -> FullPages:
        """What this component keeps at a node."""
        value = node.values[self._index]
        assert isinstance(value, FullPages)
        return value

    def adopt(self, node: Node, pages: Pages, giver: int) -> None:
        if self.pool.ledger is not None:
            self.pool.ledger.move(pages, giver, node_owner(node.id))
        node.values.append(FullPages(pages.copy()))
        self._evictable += len(pages)

    def split(self, upper: Node, lower: Node, pages: int) -> None:
        value = self.held(lower)
        first, rest = value.pages[:pages], value.pages[pages:]
        if self.pool.ledger is not None:
            self.pool.ledger.move(first, node_owner(lower.id), node_owner(upper.id))
        upper.values.append(FullPages(first, value.locks))
        value.pages = rest

    def accepts_boundary(self, node: Node, whole: bool) -> bool:
        return True

    def collect(self, node: Node) -> Pages:
        runs = [self.held(ancestor).pages for ancestor in node.path()]
        runs.reverse()
        return np.concatenate(runs) if runs else np.zeros(0, np.int32)

    def lock(self, node: Node) -> None:
        while node.parent is not None:
            self._lock_one(node)
            node = node.parent

    def _lock_one(self, node: Node) -> None:
        value = self.held(node)
        if value.locks == 0:
            self._evictable -= len(value.pages)
            self._protected += len(value.pages)
            self.order.discard(node)
        value.locks += 1

    def extend_lock(self, held: Node, node: Node) -> None:
        ancestor = node
        while ancestor is not held:
            assert ancestor.parent is not None, f"tree node {node.id} is not below node {held.id}"
            self._lock_one(ancestor)
            ancestor = ancestor.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            value = self.held(node)
            if value.locks <= 0:
                raise RuntimeError(f"tree node {node.id} was unlocked more often than locked")
            value.locks -= 1
            if value.locks == 0:
                self._protected -= len(value.pages)
                if node.dead:
                    self._give_up(node, value.pages)
                else:
                    self._evictable += len(value.pages)
                    self.touch(node)
            node = node.parent

    def lockable(self, node: Node, pages: int) -> int:
        total = 0
        while node.parent is not None and self.held(node).locks == 0:
            total += pages
            node = node.parent
            pages = len(node.key) // self._tree.page_bytes
        return total

    def bury(self, node: Node) -> None:
        value = self.held(node)
        self.order.discard(node)
        if value.locks == 0:
            self._evictable -= len(value.pages)
            self._give_up(node, value.pages)

    def touch(self, node: Node) -> None:
        if not node.children and self.held(node).locks == 0:
            self.order.add(node)
        else:
            self.order.discard(node)

    def remove(self, node: Node) -> None:
        pages = self.held(node).pages
        self.order.discard(node)
        self._evictable -= len(pages)
        self._give_up(node, pages)

    def trim(self, node: Node, pages: int) -> None:
        value = self.held(node)
        self._evictable -= len(value.pages) - pages
        self._give_up(node, value.pages[pages:])
        value.pages = value.pages[:pages]

    def candidate(self) -> Node | None:
        return self.order.first()

    def give_back(self) -> None:
        if self._given_up:
            owners = np.repeat(self._given_up_by, [len(run) for run in self._given_up])
            self.pool.free(np.concatenate(self._given_up), owners)
            self._given_up.clear()
            self._given_up_by.clear()

    def _give_up(self, node: Node, pages: Pages) -> None:
        self._given_up.append(pages)
        self._given_up_by.append(node_owner(node.id))
