"""What a node of the tree may hold, beside its key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sglang_jax.mem_cache.ledger import Pages

if TYPE_CHECKING:
    from sglang_jax.mem_cache.radix_tree import Node, RadixTree


class Component(ABC):
    """One kind of cached thing: its value at each node, and the rules of its life.

    The tree calls these hooks, each on all of its components; nothing else touches a component's values. A model names
    its components; a match ends only where all of them accept it, and what one gives up goes for all. What the hooks
    give up is free once the tree calls `give_back`, at the end of whatever it does.
    """

    @abstractmethod
    def attach(self, tree: RadixTree) -> None:
        """Told once which tree it serves."""

    @abstractmethod
    def adopt(self, node: Node, pages: Pages, giver: int) -> None:
        """A new leaf takes over `pages` `[pages of the node]` from the owner with code `giver`."""

    @abstractmethod
    def split(self, upper: Node, lower: Node, pages: int) -> None:
        """`upper` was just made of the first `pages` pages of `lower`, whose value is to be divided."""

    @abstractmethod
    def accepts_boundary(self, node: Node, whole: bool) -> bool:
        """True where a match may end at this node's end, or (not `whole`) inside it, where it would be split."""

    @abstractmethod
    def collect(self, node: Node) -> Pages:
        """Pages from the root's end to this node's end, `[pages]`."""

    @abstractmethod
    def lock(self, node: Node) -> None:
        """A request depends on the prefix that ends at `node`."""

    @abstractmethod
    def unlock(self, node: Node) -> None:
        """Takes one `lock` of this very node back."""

    @abstractmethod
    def extend_lock(self, held: Node, node: Node) -> None:
        """A lock on `held` becomes one on `node`, which is `held` or below it."""

    @abstractmethod
    def lockable(self, node: Node, pages: int) -> int:
        """Evictable pages that a lock on the first `pages` pages of `node`, and on all above it, would protect."""

    @abstractmethod
    def bury(self, node: Node) -> None:
        """The tree cut the node off: no match will reach it. What no lock keeps is given up now, the rest when its last
        lock goes."""

    @abstractmethod
    def remove(self, node: Node) -> None:
        """The tree takes out a leaf that no lock keeps: gives up what is held there."""

    @abstractmethod
    def trim(self, node: Node, pages: int) -> None:
        """The tree shortens a leaf that no lock keeps to its first `pages` pages: gives up the rest."""

    @abstractmethod
    def candidate(self) -> Node | None:
        """The leaf to evict from next, None if there is none."""

    @abstractmethod
    def give_back(self) -> None:
        """Frees what was given up since the last call."""

    @abstractmethod
    def touch(self, node: Node) -> None:
        """The node's recency changed, or it lost a child."""

    @property
    @abstractmethod
    def evictable(self) -> int:
        """Pages that eviction could free now."""

    @property
    @abstractmethod
    def protected(self) -> int:
        """Pages that locks keep."""
