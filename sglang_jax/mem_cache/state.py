"""Recurrent state: a node may hold the state after all tokens up to its end, a snapshot, in one slot of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.component import Passed, PooledComponent
from sglang_jax.mem_cache.eviction import EvictionOrder, Score
from sglang_jax.mem_cache.ledger import Pages, node_owner
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.radix_tree import Node

_HEAD_START = 8
"""A snapshot that was hit goes as though it had been used so many uses of the tree later, for each slot. Most are of
the ends of prompts, which nobody asks for again; the few that many prompts begin with should not go for them. Those of
a conversation are hit as well, until a turn has left the next: from then on they are as any other."""

_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A node's state, in slot `slot`.

    - `pins`: how many rows are to begin with it, or do so in a step in flight, and how many sessions end here;
      `sessions`: of these the sessions.
    - `hits`: how many rows began with it, and one if it was known when it was written that another prompt would.
      `passed`: one of them has left a state further on, where whoever goes on from it will begin. `shared`: another
      prompt was known, or a row began with it after that.
    - `writer`: serial of the record that computed it; `proven`: something was sampled from it and was finite.
    """

    slot: int
    pins: int = 0
    hits: int = 0
    passed: bool = False
    shared: bool = False
    writer: int = 0
    proven: bool = False
    sessions: int = 0

    @property
    def spare(self) -> bool:
        """Whether sessions alone keep it."""
        return 0 < self.pins == self.sessions


class States(PooledComponent):
    """Slots of layers that keep a state in the place of keys. A node's value is a `Snapshot`, or None.

    - A state belongs to one length: a match ends only at the end of a node that has one, a split gives the upper part
      none, and a leaf that is shortened loses its own.
    - A lock keeps no snapshot, a pin does: once its row has begun, it needs the state no longer.
    - Eviction takes the slot and leaves the node. A leaf without a state, on which nobody depends, is the tree's to
      remove.
    - In a run of pages the last entry is the slot, or 0; all others are 0.
    """

    complete = False

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self._by_use = policy is EvictionPolicy.LRU
        super().__init__(pool, EvictionOrder(policy, self._last_use if self._by_use else None))

    def _last_use(self, node: Node) -> Score:
        value = self.snapshot(node)
        wanted = value is not None and (value.shared or (value.hits > 0 and not value.passed))
        return (node.last_access + _HEAD_START * self.pool.total * wanted, node.id)

    def snapshot(self, node: Node) -> Snapshot | None:
        """The state at the node's end, if it is there."""
        if node.parent is None:
            return None
        value = node.values[self._index]
        assert value is None or isinstance(value, Snapshot)
        return value

    def pages(self, node: Node) -> Pages:
        value = self.snapshot(node)
        return _NOTHING if value is None else np.array([value.slot], np.int32)

    def collect(self, node: Node, count: int) -> Pages:
        slots = np.zeros(count, np.int32)
        if (value := self.snapshot(node)) is not None:
            slots[-1] = value.slot
        return slots

    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        node.values.append(None)
        self.fill(node, pages, previous_owner)

    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        if not pages[-1] or self.snapshot(node) is not None:
            return
        self._move(pages[-1:], previous_owner, node_owner(node.id))
        node.values[self._index] = Snapshot(int(pages[-1]))
        self.evictable += 1
        self.touch(node)

    def pin_snapshot(self, node: Node, *, session: bool = False) -> None:
        """A row is to begin with the state at the node's end, which is there; or the next turn of a session."""
        value = self.snapshot(node)
        assert value is not None, f"tree node {node.id} has no state to begin with"
        self.spare -= value.spare
        if session:
            self.session += value.sessions == 0
            value.sessions += 1
        if value.pins == 0:
            self.evictable -= 1
            self.protected += 1
        value.pins += 1
        self.spare += value.spare
        self.touch(node)

    def unpin_snapshot(self, node: Node, *, session: bool = False) -> None:
        """Takes one `pin_snapshot` back."""
        value = self.snapshot(node)
        if value is None or value.pins <= 0 or (session and value.sessions <= 0):
            raise RuntimeError(f"the state of tree node {node.id} was unpinned more often than pinned")
        self.spare -= value.spare
        if session:
            value.sessions -= 1
            self.session -= value.sessions == 0
        value.pins -= 1
        self.spare += value.spare
        if value.pins:
            return
        self.protected -= 1
        if node.dead:
            self._drop(node, value)
        else:
            self.evictable += 1
            self.touch(node)

    def give(self, node: Node, slot: int, previous_owner: int) -> None:
        """The node takes over a slot with the state at its end, unless it has one."""
        self.fill(node, np.array([slot], np.int32), previous_owner)

    def hand_over(self, node: Node, owner: int) -> int:
        """The state at the node's end, which nobody has pinned, becomes `owner`'s: its slot."""
        value = self.snapshot(node)
        assert value is not None
        assert value.pins == 0
        self._move(self.pages(node), node_owner(node.id), owner)
        node.values[self._index] = None
        self.evictable -= 1
        self.touch(node)
        return value.slot

    def pass_by(self, node: Node) -> None:
        """A row that began with the state at the node's end, which is there, has left one further on."""
        value = self.snapshot(node)
        assert value is not None
        if not value.passed:
            value.passed = True
            self.order.discard(node)  # it has a place by its score, which is lower now
            self.touch(node)

    def has_room_on_trial(self) -> bool:
        """Whether a slot is free, or held by a snapshot that goes before a new one would that nobody has asked for."""
        if self.pool.num_free:
            return True
        node = self.candidate()
        return node is not None and not (self._by_use and self._last_use(node)[0] > self._tree.now)

    def make_room(self, count: int) -> int:
        """Evicts `count` snapshots, or as many as may go; how many went."""
        return self._tree.evict(self, count)

    def split(self, upper: Node, lower: Node) -> None:
        upper.values.append(None)

    def may_join(self, upper: Node, lower: Node) -> bool:
        return self.snapshot(upper) is None

    def join(self, upper: Node, lower: Node) -> None:
        """There is nothing to take over."""

    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        place = self._index
        while index >= 0:
            node, pages = passed[index]
            if node.values[place] is not None and pages == node.length:
                return index
            index -= 1
        return index

    def accepts_end(self, node: Node) -> bool:
        return self.snapshot(node) is not None

    def frees(self, node: Node, count: int) -> bool:
        value = self.snapshot(node)
        return value is not None and value.spare

    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        return 0  # where no other slot is left, the request takes this one over

    def bury(self, node: Node) -> None:
        self.order.discard(node)
        value = self.snapshot(node)
        if value is not None and value.pins == 0:
            self.evictable -= 1
            self._drop(node, value)

    def remove(self, node: Node) -> None:
        self.bury(node)

    def trim(self, node: Node, pages: int) -> bool:
        self.bury(node)
        return False

    def evict_at(self, node: Node, wanted: int) -> int:
        self.bury(node)
        return node.length

    def touch(self, node: Node) -> None:
        value = self.snapshot(node)
        if value is not None and value.pins == 0 and not node.dead:
            self.order.add(node)
        else:
            self.order.discard(node)

    def _drop(self, node: Node, value: Snapshot) -> None:
        self._give_up(node, np.array([value.slot], np.int32))
        node.values[self._index] = None
