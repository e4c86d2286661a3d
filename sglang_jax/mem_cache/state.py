"""Snapshots of recurrent states: a node may hold the state after all tokens up to its end, in one slot of a pool."""

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
"""Bonus in the eviction order of a snapshot that was hit, in uses of the tree per slot: most snapshots are at the ends
of prompts and never used again, and should not displace the few that many prompts share. Snapshots of a conversation
have it, too, until a turn has left the next one."""

_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A node's state, in slot `slot`.

    - `pins`: rows that will start with it, or do so in a step in flight, and sessions that end here; `sessions`: how
      many are sessions.
    - `hits`: rows that started with it, plus one if another prompt was known to share it when it was written. `passed`:
      one of these rows has left a later state, from which its continuations will start. `shared`: another prompt was
      known to share it, or a row started with it after `passed`.
    - `guess`: tokens that it saves if it is where prompts were guessed to diverge, until one starts with it; then 0.
      `minor`: it is before such a place of the same prompt, so that it is less likely to be used.
    - `writer`: serial of the record that computed it; `proven`: a finite token was sampled from it.
    """

    slot: int
    pins: int = 0
    hits: int = 0
    passed: bool = False
    shared: bool = False
    guess: int = 0
    minor: bool = False
    writer: int = 0
    proven: bool = False
    sessions: int = 0

    @property
    def spare(self) -> bool:
        return 0 < self.pins == self.sessions


class States(PooledComponent):
    """The component of layers that keep a state instead of keys. A node's value is a `Snapshot`, or None.

    - A state belongs to one length: a match ends only at the end of a node that has one, a split gives the upper part
      none, and a leaf that is shortened loses its own.
    - A lock does not keep a snapshot, a pin does: after its first step, a row does not need the snapshot any more.
    - Eviction takes the slot and leaves the node. In a run of pages, the last entry is the slot, or 0; all others are
      0.
    """

    complete = False

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self._by_use = policy is EvictionPolicy.LRU
        super().__init__(pool, EvictionOrder(policy, self._last_use if self._by_use else None))

    def _last_use(self, node: Node) -> Score:
        value = self.snapshot(node)
        wanted = value is not None and (value.shared or (value.hits > 0 and not value.passed))
        minor = value is not None and value.minor and not value.hits
        return (node.last_access + self.pool.total * (_HEAD_START * wanted - minor), node.id)

    def snapshot(self, node: Node) -> Snapshot | None:
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
        """Pins the snapshot at the node's end, with which a row or a session's next turn will start."""
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
        """Moves a slot with the state at its end to the node, unless the node has one."""
        self.fill(node, np.array([slot], np.int32), previous_owner)

    def hand_over(self, node: Node, owner: int) -> int:
        """Moves the snapshot at the node's end, which has no pin, to `owner`. Returns its slot."""
        value = self.snapshot(node)
        assert value is not None
        assert value.pins == 0
        self._move(self.pages(node), node_owner(node.id), owner)
        node.values[self._index] = None
        self.evictable -= 1
        self.touch(node)
        return value.slot

    def pass_by(self, node: Node) -> None:
        """A row that started with the snapshot at the node's end has left a later one."""
        value = self.snapshot(node)
        assert value is not None
        if not value.passed:
            value.passed = True
            self._lower(node)

    def demote(self, node: Node) -> None:
        """Makes the snapshot at the node's end minor."""
        value = self.snapshot(node)
        assert value is not None
        value.minor = True
        self._lower(node)

    def _lower(self, node: Node) -> None:
        """Puts a node in its place in the eviction order after its score has become lower."""
        self.order.discard(node)
        self.touch(node)

    def has_room_on_trial(self) -> bool:
        """Whether a slot is free, or has a snapshot that would be evicted before a new, unused one."""
        if self.pool.num_free:
            return True
        node = self.candidate()
        return node is not None and not (self._by_use and self._last_use(node)[0] > self._tree.now)

    def make_room(self, count: int) -> int:
        """Evicts up to `count` snapshots. Returns their number."""
        return self._tree.evict(self, count)

    def split(self, upper: Node, lower: Node) -> None:
        upper.values.append(None)

    def may_join(self, upper: Node, lower: Node) -> bool:
        return self.snapshot(upper) is None

    def join(self, upper: Node, lower: Node) -> None:
        """Does nothing: `upper` has no snapshot."""

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

    def would_free(self, node: Node, count: int) -> bool:
        value = self.snapshot(node)
        return value is not None and value.spare

    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        return 0  # if no other slot is left, the request takes this one over

    def cut_off(self, node: Node) -> None:
        self.order.discard(node)
        value = self.snapshot(node)
        if value is not None and value.pins == 0:
            self.evictable -= 1
            self._drop(node, value)

    def remove(self, node: Node) -> None:
        self.cut_off(node)

    def trim(self, node: Node, pages: int) -> bool:
        self.cut_off(node)
        return False

    def evict_at(self, node: Node, wanted: int) -> int:
        self.cut_off(node)
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
