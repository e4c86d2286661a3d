"""Components: the kinds of memory that nodes of the tree hold, in addition to their keys."""

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
"""A node on the path of a match, and how many of its first pages match the prompt."""


class Component(ABC):
    """One kind of cached memory: the pages of it that each node holds, and their life cycle.

    The tree counts locks, splits, evicts and removes, and calls a hook of all components for each; a match ends only
    where all accept it. Pages that hooks give up are free after `give_back`, at the end of the tree's operation. Arrays
    of pages have one entry per page of a run's key, 0 for a missing page.

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
        """Protected pages that sessions keep, with or without other owners."""
        self.spare = 0
        """Protected pages that only sessions keep: evictable after all of them let go."""

    def attach(self, tree: RadixTree) -> None:
        self._tree = tree
        self._index = tree.components.index(self)

    @abstractmethod
    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """Moves `pages` `[pages of the node]`, and the array itself, to a new leaf from the owner with this code, which
        still depends on all of them."""

    @abstractmethod
    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """Moves those of `pages` `[pages of the node]`, a recomputed copy, to the node that it lacks."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """Divides the value of `lower` after the tree split it: `upper` has its first pages now."""

    @abstractmethod
    def may_join(self, upper: Node, lower: Node) -> bool:
        """Whether `upper` and its only child can become one node without losing a place at which a request may
        start."""

    @abstractmethod
    def join(self, upper: Node, lower: Node) -> None:
        """The opposite of `split`: moves the value of `upper`, which is removed, to `lower`, whose length has not
        changed yet."""

    @abstractmethod
    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        """The last index, at most `index`, in `passed`, the path of a match from a root, after whose pages a request
        may start; -1 if only the root is left."""

    @abstractmethod
    def accepts_end(self, node: Node) -> bool:
        """Whether a request may start at the node's end."""

    def pin(self, node: Node) -> None:  # noqa: B027
        """The node got its first lock. This hook and the next four do nothing by default."""

    def unpin(self, node: Node) -> None:  # noqa: B027
        """The node lost its last lock."""

    def session_begins(self, node: Node) -> None:  # noqa: B027
        """A first session depends on the prefix that ends at the node or below."""

    def session_ends(self, node: Node) -> None:  # noqa: B027
        """No session depends on that prefix any more."""

    def set_spare(self, node: Node, spare: bool) -> None:  # noqa: B027
        """Only sessions depend on the node and its subtree from now on (`spare`), or no longer only they."""

    @abstractmethod
    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        """Evictable pages that a request would protect if it started after the first `pages` pages of `node`;
        `without_sessions`: counting pages that would be evictable if sessions kept none."""

    @abstractmethod
    def cut_off(self, node: Node) -> None:
        """The tree cut the node off: gives up its pages, without a lock now, otherwise when its last lock goes."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """Gives up the pages of a leaf without locks, which the tree removes."""

    @abstractmethod
    def trim(self, node: Node, pages: int) -> bool:
        """Gives up all but the first `pages` pages of a leaf without locks, which the tree shortens. False if a match
        may not end at the new end, as far as the leaf shows: other nodes are not visited, since eviction shortens
        leaves page by page. If a node above forbids it, the leaf is evicted soon, as it is next in the order."""

    @abstractmethod
    def evict_at(self, node: Node, wanted: int) -> int:
        """Evicts at the `candidate`: gives up to `wanted` pages that do not need a change of the tree. Returns the
        number of pages to which the tree has to shorten the node."""

    @abstractmethod
    def touch(self, node: Node) -> None:
        """The node is new, got its first child, or lost its last one."""

    def candidate(self) -> Node | None:
        return self.order.first()

    @abstractmethod
    def give_back(self) -> None:
        """Frees the pages given up since the last call."""


class PooledComponent(Component):
    def __init__(self, pool: PagePool, order: EvictionOrder) -> None:
        super().__init__(order)
        self.pool = pool
        self._given_up: list[Pages] = []
        self._given_up_by: list[int] = []  # only filled with a ledger, which records owners

    @abstractmethod
    def pages(self, node: Node) -> Pages:
        """The component's pages of a node, `[pages]`."""

    @abstractmethod
    def collect(self, node: Node, count: int) -> Pages:
        """The last `count` pages of the prefix that ends at `node`, `[count]`. Do not change the array."""

    def give_back(self) -> None:
        runs, owners = self._given_up, self._given_up_by
        if runs:
            pages = runs[0] if len(runs) == 1 else np.concatenate(runs)
            self.pool.free(pages, np.repeat(owners, [len(run) for run in runs]) if owners else 0)
            runs.clear()
            owners.clear()

    @abstractmethod
    def would_free(self, node: Node, count: int) -> bool:
        """Whether a session that keeps the last `count` pages of the prefix ending at `node` keeps some that no request
        does."""

    def _give_up(self, node: Node, pages: Pages) -> None:
        self._given_up.append(pages)
        if self.pool.ledger is not None:
            self._given_up_by.append(node_owner(node.id))

    def _move(self, pages: Pages, source: int, target: int) -> None:
        if self.pool.ledger is not None:
            self.pool.ledger.move(pages, source, target)
