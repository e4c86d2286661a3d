"""Pins, by which sessions keep cached prefixes between their turns. A pin is a lock on the prefix of the session's last
finished turn, with the window pages and the state at its end, so that the next turn finds an ordinary cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.radix_tree import Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV


@dataclass(slots=True, eq=False)
class Pin:
    """The pin of one session. `node`: the end of the prefix that it keeps, or None; `pages`: of that prefix; `busy`:
    whether a turn of the session runs or waits."""

    node: Node | None = None
    pages: int = 0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a finished turn keeps: its session's pin moves to the first `length` tokens of its row."""

    pin: Pin
    length: int


class Pins:
    """All pins of a cache. `held`: those that keep a prefix, the most recently moved last; `num_let_go`: how many let
    go for lack of memory or because of `share`, the maximum fraction of any pool that pins may keep."""

    def __init__(self, tree: RadixTree, groups: Sequence[Group]) -> None:
        self.held: dict[Pin, None] = {}
        self.num_let_go = 0
        self.share = 1.0
        self._tree = tree
        self._groups = groups

    def move(self, kept: Kept, record: RowKV) -> None:
        """Moves the pin of a finished turn, whose row is about to be released, to the last place on the row's path at
        which the next turn may start."""
        page = self._tree.page_size
        length = record.cache_protected_len // page
        node, pages = self._tree.last_start(record.locked_node, length, kept.length // page)
        self._place(kept.pin, node, pages)

    def shorten(self, pin: Pin, length: int) -> None:
        """The session has only `length` tokens now: moves a pin beyond them back to the last place at which the next
        turn may start, if there is one."""
        most = length // self._tree.page_size
        if pin.node is not None and pin.pages > most:
            self._tree.split_path(pin.node, pin.pages, most)
            self._place(pin, *self._tree.last_start(pin.node, pin.pages, most))

    def let_go(self, pin: Pin) -> None:
        node, pages = pin.node, pin.pages
        if node is None:
            return
        pin.node, pin.pages = None, 0
        del self.held[pin]
        self._give_up(node, pages)

    def relieve(self, short: Sequence[Group], own: Pin | None = None) -> bool:
        """Makes memory of the groups `short` evictable: lets go the oldest pin of an idle session that keeps some of
        it, else the oldest pin, and `own` last. False if no pin helps: pages that a running turn uses, too, are not
        freed by its session's pin."""
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
        return node is not None and any(group.component.would_free(node, pin.pages) for group in short)

    def keep_within_share(self) -> None:
        """Lets idle pins go, the oldest first, while pins keep more than `share` of some pool."""
        while self.held and any(group.component.session > self.share * group.pool.total for group in self._groups):
            pin = next((pin for pin in self.held if not pin.busy), None)
            if pin is None:
                return
            self.num_let_go += 1
            self.let_go(pin)

    def _place(self, pin: Pin, node: Node, pages: int) -> None:
        """Takes the new place before giving up the old one, so that nothing is evicted in between."""
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
        for group in self._groups:
            group.pin(node, pages)

    def _give_up_ends(self, node: Node, pages: int) -> None:
        for group in self._groups:
            group.unpin(node, pages)

    def _give_up(self, node: Node, pages: int) -> None:
        self._give_up_ends(node, pages)
        self._tree.unlock(node, session=True)
