"""What a node of the tree may hold, beside its key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.ledger import Pages, node_owner

if TYPE_CHECKING:
    from sglang_jax.mem_cache.page_pool import PagePool
    from sglang_jax.mem_cache.radix_tree import Node, RadixTree


Passed = tuple["Node", int]
"""A node that a match went along, and how many of its pages, from the first on, are the prompt's."""


class Component(ABC):
    """One kind of cached thing: what each node holds of it, in pages, and the rules of its life.

    The tree counts locks, splits, evicts and removes, and tells all of its components of each; a match ends only where
    all of them accept it. What the hooks give up is free once the tree calls `give_back`, at the end of whatever it
    does. Arrays of pages have one entry for each page of a run's key, 0 where there is no page.

    `complete`: every node holds a page for each page of its key, so that a match may end at any of them.
    """

    complete: ClassVar[bool]

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.evictable = 0
        """Pages that eviction could free now."""
        self.protected = 0
        """Pages that locks keep."""
        self.session = 0
        """Those of them that sessions keep, whoever else does."""
        self.spare = 0
        """Those of them that sessions alone keep: evictable once all of these let go."""

    def attach(self, tree: RadixTree) -> None:
        """Told once which tree it serves."""
        self._tree = tree
        self._index = tree.components.index(self)

    @abstractmethod
    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """A new leaf takes over `pages` `[pages of the node]`, the array as well, from the owner with this code, who
        goes on to depend on all of them."""

    @abstractmethod
    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """`pages` `[pages of the node]` hold what the node holds, computed again: takes over those that the node
        lacks."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was just made of the first pages of `lower`, whose value is to be divided."""

    @abstractmethod
    def may_join(self, upper: Node, lower: Node) -> bool:
        """Whether `upper` and its only child can be one node, so that no place is lost at which a request may start.
        Nobody depends on the end of `upper` alone."""

    @abstractmethod
    def join(self, upper: Node, lower: Node) -> None:
        """The opposite of `split`, of nodes that `may_join`: `lower`, whose length is yet to change, takes over what
        `upper` holds, which is no more."""

    @abstractmethod
    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        """A match went along the nodes of `passed` from a root on: the index, at most `index`, of the last one at the
        end of whose pages a request may start; -1 where only the root is left."""

    @abstractmethod
    def accepts_end(self, node: Node) -> bool:
        """Whether a request may start at the node's end."""

    def pin(self, node: Node) -> None:  # noqa: B027
        """The node got its first lock. This and the next four do nothing where locks keep nothing."""

    def unpin(self, node: Node) -> None:  # noqa: B027
        """The node's last lock went."""

    def session_begins(self, node: Node) -> None:  # noqa: B027
        """The first session depends on the prefix that ends at the node or below."""

    def session_ends(self, node: Node) -> None:  # noqa: B027
        """The last one no longer does."""

    def set_spare(self, node: Node, spare: bool) -> None:  # noqa: B027
        """Sessions alone depend on the node and what is below it from now on; or no longer, not `spare`."""

    @abstractmethod
    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        """Evictable pages that a request would protect that starts after the first `pages` pages of `node`;
        `without_sessions`: or that would be evictable if sessions kept nothing."""

    @abstractmethod
    def bury(self, node: Node) -> None:
        """The tree cut the node off: no match will reach it. What no lock keeps is given up now, the rest when its last
        lock goes."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """The tree takes out a leaf that no lock keeps: gives up what is held there."""

    @abstractmethod
    def trim(self, node: Node, pages: int) -> bool:
        """The tree shortens a leaf that no lock keeps to its first `pages` pages: gives up the rest. False where a
        match may not end at the new end. Looks at no other node, as eviction shortens a leaf page by page: if what is
        above the leaf forbids it, the leaf goes soon, as it is next in the order."""

    @abstractmethod
    def evict_at(self, node: Node, wanted: int) -> int:
        """Eviction reached the node, which is `candidate`. Gives up to `wanted` pages up that go without a change of
        the tree; returns to how many pages of its key the tree is to shorten the node."""

    @abstractmethod
    def touch(self, node: Node) -> None:
        """The node is new, or got its first child, or lost its last one."""

    def candidate(self) -> Node | None:
        """The node to evict from next, None if there is none."""
        return self.order.first()

    @abstractmethod
    def give_back(self) -> None:
        """Frees what was given up since the last call."""


class PooledComponent(Component):
    """A component whose pages are those of a pool.

    **Arguments:** `pool`: where pages go that are given up; `order`: which node goes first.
    """

    def __init__(self, pool: PagePool, order: EvictionOrder) -> None:
        super().__init__(order)
        self.pool = pool
        self._given_up: list[Pages] = []
        self._given_up_by: list[int] = []  # filled where there is a ledger, which alone knows owners

    @abstractmethod
    def pages(self, node: Node) -> Pages:
        """What the component holds at a node, `[pages]`."""

    @abstractmethod
    def collect(self, node: Node, count: int) -> Pages:
        """The last `count` pages of the prefix that ends at `node`, `[count]`; not to be written to."""

    def give_back(self) -> None:
        runs, owners = self._given_up, self._given_up_by
        if runs:
            pages = runs[0] if len(runs) == 1 else np.concatenate(runs)
            self.pool.free(pages, np.repeat(owners, [len(run) for run in runs]) if owners else 0)
            runs.clear()
            owners.clear()

    @abstractmethod
    def frees(self, node: Node, count: int) -> bool:
        """Whether a session that keeps the `count` pages up to the end of `node` keeps some that no request does."""

    def _give_up(self, node: Node, pages: Pages) -> None:
        self._given_up.append(pages)
        if self.pool.ledger is not None:
            self._given_up_by.append(node_owner(node.id))

    def _move(self, pages: Pages, source: int, target: int) -> None:
        if self.pool.ledger is not None:
            self.pool.ledger.move(pages, source, target)
