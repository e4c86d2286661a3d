"""What a session keeps in the prefix cache between its turns: a pin, and no memory of its own.

A pin is a lock on the prefix that the session's last finished turn left behind, the window pages at its end and the
state there. So a request that goes on from it finds an ordinary cached prefix; and a pin that is let go leaves one
behind that may be evicted like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.radix_tree import Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV


@dataclass(slots=True, eq=False)
class Pin:
    """One session's. `node`: where the prefix ends that it keeps, None while it keeps none; `pages`: of that prefix.
    `busy`: a turn of the session runs or waits."""

    node: Node | None = None
    pages: int = 0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """A turn that has finished: the pin that moves to what it leaves behind, and how many of its tokens are the
    session's. What was computed behind them is not kept."""

    pin: Pin
    length: int


class Pins:
    """All pins of a cache. A pin is in `held` as long as it keeps something; those that moved last stand last.

    `num_let_go`: how many were let go because others needed the memory. `share`: most of any pool that pins may keep.
    """

    def __init__(self, tree: RadixTree, groups: Sequence[Group]) -> None:
        self.held: dict[Pin, None] = {}
        self.num_let_go = 0
        self.share = 1.0
        self._tree = tree
        self._groups = groups

    def move(self, kept: Kept, record: RowKV) -> None:
        """A turn's row is about to be released: its session's pin moves to the last place on the row's path where the
        next turn may start."""
        page = self._tree.page_size
        length = record.cache_protected_len // page
        node, pages = self._tree.last_start(record.locked_node, length, kept.length // page)
        self._take(kept.pin, node, pages)

    def shorten(self, pin: Pin, length: int) -> None:
        """Only the first `length` tokens are the session's after all: a pin that lies beyond moves back to where the
        next turn may start, if anywhere."""
        most = length // self._tree.page_size
        if pin.node is not None and pin.pages > most:
            self._tree.part_at(pin.node, pin.pages, most)
            self._take(pin, *self._tree.last_start(pin.node, pin.pages, most))

    def let_go(self, pin: Pin) -> None:
        """The pin keeps nothing any more: what it kept is evicted when its turn comes."""
        node, pages = pin.node, pin.pages
        if node is None:
            return
        pin.node, pin.pages = None, 0
        del self.held[pin]
        self._give_up(node, pages)

    def relieve(self, short: Sequence[Group], own: Pin | None = None) -> bool:
        """Somebody needs memory of the groups `short`: of the pins that keep some of it from eviction, lets the oldest
        of an idle session go, or, where all are busy, the oldest, `own` last. Their turns lose nothing but time. False
        if there is none: what a running turn has as well is not free without its session's pin."""
        best: Pin | None = None
        for pin in self.held:
            if (best is None or (best.busy and not pin.busy) or best is own) and self._frees(pin, short):
                best = pin
                if not pin.busy:
                    break
        if best is None:
            return False
        self.num_let_go += 1
        self.let_go(best)
        return True

    def _frees(self, pin: Pin, short: Sequence[Group]) -> bool:
        node = pin.node
        return node is not None and any(group.component.frees(node, pin.pages) for group in short)

    def keep_within_share(self) -> None:
        """Lets idle pins go, the oldest first, while pins keep more of some pool than they may."""
        while self.held and any(group.component.session > self.share * group.pool.total for group in self._groups):
            pin = next((pin for pin in self.held if not pin.busy), None)
            if pin is None:
                return
            self.num_let_go += 1
            self.let_go(pin)

    def _take(self, pin: Pin, node: Node, pages: int) -> None:
        """The new place is taken before the old one is given up, so that nothing goes between."""
        old, old_pages = pin.node, pin.pages
        self.held.pop(pin, None)
        if node.parent is None:
            pin.node, pin.pages = None, 0
        else:
            if old is not None and self._tree.extend_session(old, node):
                self._keep_ends(node, pages)
                self._give_up_ends(old, old_pages)
                old = None
            else:
                self._tree.lock(node, session=True)
                self._keep_ends(node, pages)
            pin.node, pin.pages = node, pages
            self.held[pin] = None
        if old is not None:
            self._give_up(old, old_pages)

    def _keep_ends(self, node: Node, pages: int) -> None:
        """What each group keeps at the end of a prefix."""
        for group in self._groups:
            group.pin(node, pages)

    def _give_up_ends(self, node: Node, pages: int) -> None:
        for group in self._groups:
            group.unpin(node, pages)

    def _give_up(self, node: Node, pages: int) -> None:
        self._give_up_ends(node, pages)
        self._tree.unlock(node, session=True)
