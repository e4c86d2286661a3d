"""The cache group of layers with recurrent states: a slot for each running row, and snapshots in the tree."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.guesses import Guesses
from sglang_jax.mem_cache.ledger import Pages, request_owner
from sglang_jax.mem_cache.lengths import Index, RowLengths
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.radix_tree import Insertion, Node
from sglang_jax.mem_cache.row_kv import MAX_BRANCHES, RowKV
from sglang_jax.mem_cache.state import States
from sglang_jax.runner.plan import Bool, Int32, PoolSpec, SlotCopies

MIN_GAIN = 32
"""Minimum tokens between a snapshot and the previous one on its path: fewer are not worth a slot and a chunk's end."""

GAIN_OVER_LOSS = 128
"""Minimum ratio of the tokens that a state saves to those that its step loses by ending a chunk at a page boundary:
states cost less than 1 % of the steps of a prompt."""

_UNLIMITED = 2**31 - 1
_LEFT_TO_SNAPSHOTS = 4
"""One of this many slots becomes a second slot only of a turn of a session."""


class StateGroup(Group):
    """Layers that keep the state after all of a row's tokens in one slot.

    A row's own slot, the only column of `table`, has the state after all tokens of launched steps (`kv_planned`, less
    rejected drafts) when these have run. If its next step starts with another slot, that is its *source*: a snapshot,
    pinned until the step has finished, or the row's second slot.

    `number`: of its pool; `interval`: tokens between boundaries at which decode rows change slots, so that the state at
    the last boundary exists when the request ends; 0 for none. Turns of sessions change slots at every page, and keep
    any state that costs no step, from which the next turn starts.
    """

    component: States
    grows = False
    least_gain = MIN_GAIN
    gain_over_loss = GAIN_OVER_LOSS

    def __init__(
        self, spec: PoolSpec, component: States, lengths: RowLengths, table: PageTable, number: int, interval: int
    ) -> None:
        super().__init__(spec, component, lengths, table)
        self.number = number
        rows = len(lengths.kv_allocated)
        self.interval = self.pages_for(interval) * self.page_size
        self.guesses = Guesses(self.page_size)
        self._in_session: Bool = np.zeros(rows, np.bool_)
        self._slots: Int32 = self.table.pages[:, 0]  # a view of the only column
        self._column: Index = np.zeros(rows, np.intp)
        self._column.setflags(write=False)
        self._sources: Int32 = np.zeros(rows, np.int32)
        self._pending = 0  # number of rows with a source
        self._pinned: dict[int, Node] = {}
        self._starting: deque[tuple[int, Node]] = deque()
        self._second: Int32 = np.zeros(rows, np.int32)
        self._second_len: Index = np.zeros(rows, np.intp)
        self._second_step: NDArray[np.int64] = np.zeros(rows, np.int64)
        self._finished_step = -1

    @property
    def unit(self) -> str:
        return "slot"

    @property
    def available(self) -> int:
        """Slots that can be taken now: free, evictable, or second slots that no step in flight reads."""
        return super().available + len(self._idle_second_slots())

    @property
    def max_tokens(self) -> int:
        """Number of slots: a state has the same size at any length."""
        return self.pool.total

    @property
    def used_tokens(self) -> int:
        return self.pool.total - self.available

    @property
    def session_tokens(self) -> int:
        return self.component.session

    @property
    def size(self) -> str:
        return f"{self.pool.total} states"

    @property
    def remedy(self) -> str:
        return "max_mamba_cache_size"

    def held_from(self, row: int) -> int:
        return 0

    def owned(self, record: RowKV, allocated: int) -> Pages:
        slots = np.array([self._slots[record.row], self._second[record.row]], np.int32)
        return slots[slots > 0]

    def pins(self) -> Counter[int]:
        """By node id: the number of rows that will start with its snapshot, or do so in a step in flight."""
        return Counter([node.id for node in self._pinned.values()] + [node.id for _, node in self._starting])

    def least(self, tokens: int) -> int:
        return 1

    def prompt_need(self, tokens: int, cached: int) -> int:
        return 1

    def rest_need(self, tokens: int, row: int) -> int:
        return 0

    def output_need(self, known: Index | int, left: Index | int) -> int:
        return 0

    def open(self, record: RowKV, node: Node, pages: int) -> None:
        row, snapshot = record.row, self.component.snapshot(node)
        self._in_session[row] = record.session
        record.state_len, record.origin, record.origin_node = record.matched, snapshot, node
        if snapshot is not None:
            snapshot.hits += 1
            snapshot.shared |= snapshot.passed
        if snapshot is not None and self.available == 1 and snapshot.pins == 0:
            slot = self.component.hand_over(node, request_owner(row))
        else:
            if snapshot is not None:
                self._start_from(row, node, snapshot.slot)
            slot = self._take_one(row)
        self._set_slot(row, slot)

    def compare(self, record: RowKV, known: int, total: int) -> None:
        """Learns from a prompt that is the first to start with a guessed state, or could have started with one. Guesses
        where others will diverge from it."""
        missed, origin = known - record.matched, record.origin
        saved = missed if missed >= self.least_gain else 0
        if origin is not None and origin.guess:
            saved = max(saved, origin.guess)
            origin.guess = 0
        if saved:
            self.guesses.learn(total - known, saved)
        if not record.session and self.guesses.affordable:
            record.guesses = self.guesses.of(total, max(known, record.shared_end if record.shared_end < total else 0))

    def branch_at(self, record: RowKV, length: int) -> bool:
        if length in record.branches:
            return True
        if length - record.state_len < self.least_gain or len(record.branches) >= MAX_BRANCHES:
            return False
        insort(record.branches, length)
        record.guesses = ()
        return True

    def chunk_end(self, record: RowKV, start: int, end: int, total: int) -> int:
        """The chunk ends at its first branch point, at a probable one (`shared_end`), or at the last page boundary
        before the prompt's last token; otherwise at its last page boundary, if other prompts share more than that or if
        the state is worth the tokens that the step loses. It does not end early if there is no slot for the state."""
        if not self.available:
            return end
        on_trial = record.session or self.component.has_room_on_trial()
        least = self.least_gain
        tail = (total - 1) // self.page_size * self.page_size
        for wanted in (*record.branches, record.shared_end, tail) if on_trial else record.branches:
            if start < wanted < end and wanted - record.state_len >= least:
                end = wanted
        for wanted in record.guesses if on_trial and self.guesses.affordable else ():
            if start < wanted < end and wanted - record.state_len >= self.guesses.step_cost:
                end = wanted
        if not on_trial:
            return end
        aligned = end // self.page_size * self.page_size
        if not start < aligned or end == total:
            return end
        shared = bool(record.branches) and record.branches[-1] > end
        gain, loss = aligned - record.state_len, end - aligned
        return aligned if gain >= least and (shared or loss * self.gain_over_loss <= gain) else end

    def run(self, record: RowKV, first: int, last: int, continues: bool) -> Pages:
        slots = np.zeros(last - first, np.int32)
        if continues:
            if self._worth_a_slot(record, last * self.page_size) and self._has_room(record, last * self.page_size):
                slots[-1] = self._slots[record.row]
        elif self.last_state(record, last * self.page_size) == last * self.page_size:
            slots[-1] = self._slot_of_last_state(record, last * self.page_size)
        return slots

    def _worth_a_slot(self, record: RowKV, length: int) -> bool:
        return length == record.kv_planned_len and length - record.state_len >= self._least_gain(record)

    def _least_gain(self, record: RowKV) -> int:
        return 1 if record.session else self.least_gain

    def _has_room(self, record: RowKV, length: int) -> bool:
        """Whether there is a slot to continue in. A snapshot that was hit is displaced only for a state that another
        prompt shares."""
        asked_for = record.session or length in record.branches
        return self.available > 0 and (asked_for or self.component.has_room_on_trial())

    def share(self, record: RowKV, added: Insertion, first: int, own: Pages, step: int | None) -> bool:
        snapshot = self.component.snapshot(added.node)
        if snapshot is None:
            return False
        before, record.state_len = record.state_len, (first + len(own)) * self.page_size
        self._pass_origin(record)
        if snapshot.slot == own[-1]:
            snapshot.writer = record.serial
            snapshot.shared = record.state_len in record.branches
            snapshot.hits = int(snapshot.shared)
            if record.state_len in record.guesses:
                snapshot.guess = record.state_len - before
                self.guesses.pay()
            elif record.state_len != record.shared_end and record.state_len < max(record.guesses, default=0):
                self.component.demote(added.node)
            self._forget_slot(record.row, snapshot.slot)
            if step is not None:
                self._start_from(record.row, added.node, snapshot.slot)
                self._set_slot(record.row, self._take_one(record.row))
        return False

    def _pass_origin(self, record: RowKV) -> None:
        node = record.origin_node
        if node is not None and record.origin is not None and self.component.snapshot(node) is record.origin:
            self.component.pass_by(node)
        record.origin_node = None

    def keep_end(self, record: RowKV, most: int) -> int:
        """Up to the last state, since keys after it would be of no use."""
        length = self.last_state(record, most)
        if length <= record.state_len:
            return 0
        if length == record.cache_protected_len:
            self._leave_last_state(record)
        return length

    def last_state(self, record: RowKV, most: int) -> int:
        """The last page boundary within the `most` committed tokens of an ending request at which one of its slots has
        the state; 0 if none has."""
        committed = record.kv_committed_len
        if committed <= most and self._ends_on_boundary(record):
            return committed
        second = int(self._second_len[record.row]) if self._second[record.row] else 0
        return second if second <= most else 0

    def _ends_on_boundary(self, record: RowKV) -> bool:
        """Whether the row's own slot has the state after all committed tokens, and these are whole pages."""
        committed = record.kv_committed_len
        began = not self._sources[record.row]
        return began and record.kv_planned_len == committed and committed % self.page_size == 0

    def _slot_of_last_state(self, record: RowKV, most: int) -> int:
        own = record.kv_committed_len <= most and self._ends_on_boundary(record)
        return int(self._slots[record.row] if own else self._second[record.row])

    def _leave_last_state(self, record: RowKV) -> None:
        """Gives an ending request's last state to the node that it depends on, if it belongs to the node's end and the
        node has none."""
        node, slot = record.locked_node, self._slot_of_last_state(record, record.cache_protected_len)
        if node.dead or node.parent is None or self.component.snapshot(node) is not None:
            return
        self.component.give(node, slot, request_owner(record.row))
        snapshot = self.component.snapshot(node)
        assert snapshot is not None
        snapshot.writer, snapshot.proven = record.serial, record.proven
        self._pass_origin(record)
        self._forget_slot(record.row, slot)

    def release(self, record: RowKV, allocated: int) -> None:
        row = record.row
        node = self._pinned.pop(row, None)
        if node is not None:
            self._let_go(node)
        self._pending -= int(self._sources[row] > 0)
        self._sources[row] = 0
        self.pool.free(self.owned(record, allocated), request_owner(row))
        self.table.clear(row, 1)
        self._second[row] = 0
        self._in_session[row] = False

    def pin(self, node: Node, pages: int) -> None:
        self.component.pin_snapshot(node, session=True)

    def unpin(self, node: Node, pages: int) -> None:
        self.component.unpin_snapshot(node, session=True)
        self.component.give_back()

    def cross_boundary(self, rows: Index, lengths: Index, step: int, wanted: bool) -> None:
        """Rows at an interval continue in their second slot, so that the state at the boundary stays. If slots are
        `wanted`, one is left for waiting requests, and rows may stay in their slot, so that second slots can be taken
        back."""
        if not self._rows_change_slots or (wanted and not self._unclaimed):
            return
        at = self._in_session[rows]
        if self.interval:
            at = at | (lengths % self.interval == 0)
        moving, reached = rows[at], lengths[at]
        if np.count_nonzero(self._sources[moving]):  # a copy is pending already
            begun = self._sources[moving] == 0
            moving, reached = moving[begun], reached[begun]
        if not len(moving):
            return
        second = self._second[moving]
        if np.count_nonzero(second) < len(second):
            for place in np.flatnonzero(second == 0).tolist():
                second[place] = self._take_second_slot(int(moving[place]), wanted)
            moving, reached, second = moving[second > 0], reached[second > 0], second[second > 0]
        own = self._slots[moving]
        self._sources[moving] = own
        self._second[moving] = own
        self._pending += len(moving)
        self._second_len[moving] = reached
        self._second_step[moving] = step
        self.table.write(moving, self._column[: len(moving)], second)

    def most_queries(self, rows: Index) -> Index | None:
        """Tokens up to the next boundary at which rows change slots, since a step across it would leave no state
        there. 0 for a row that is at a boundary only if all drafts in flight are accepted: it can change slots only
        when its position is known."""
        if not self._rows_change_slots:
            return None
        lengths = self.lengths.kv_planned[rows]
        interval = np.where(self._in_session[rows], self.page_size, self.interval or _UNLIMITED)
        beyond = lengths % interval
        waits = (beyond == 0) & (self.lengths.drafts_in_flight[rows] > 0)
        return np.where(waits, 0, interval - beyond)

    def take_copies(self, rows: Index, step: int) -> tuple[SlotCopies, ...]:
        if not self._pending:
            return ()
        sources = self._sources[rows]
        (begin,) = sources.nonzero()
        if not len(begin):
            return ()
        rows, sources = rows[begin], sources[begin]
        self._sources[rows] = 0
        self._pending -= len(begin)
        for row in rows.tolist() if self._pinned else ():
            if (node := self._pinned.pop(row, None)) is not None:
                self._starting.append((step, node))
        return (SlotCopies(self.number, sources, self._slots[rows]),)

    def settle(self, step: int) -> None:
        self._finished_step = step
        while self._starting and self._starting[0][0] <= step:
            self._let_go(self._starting.popleft()[1])

    def reads_unproven(self, record: RowKV) -> bool:
        return record.origin is not None and not record.origin.proven

    def prove(self, record: RowKV) -> None:
        if record.origin is not None:
            record.origin.proven = True
        last = record.cache_protected_len // self.page_size
        for node in record.locked_node.path():
            if last * self.page_size < record.matched:  # the prefix that it started with is not its own
                break
            snapshot = self.component.snapshot(node)
            if snapshot is not None and snapshot.writer == record.serial:
                snapshot.proven = True
            last -= node.length

    def in_doubt(self, record: RowKV, node: Node, last: int) -> bool:
        snapshot = self.component.snapshot(node)
        if snapshot is None or snapshot.proven:
            return False
        # An unproven state that the row started with may come from an unproven one before it, and so on.
        return record.on_trust or snapshot.writer == record.serial or snapshot is record.origin

    def _start_from(self, row: int, node: Node, slot: int) -> None:
        self.component.pin_snapshot(node)
        self._pinned[row] = node
        self._sources[row] = slot
        self._pending += 1

    def _let_go(self, node: Node) -> None:
        self.component.unpin_snapshot(node)
        self.component.give_back()

    def _set_slot(self, row: int, slot: int) -> None:
        self.table.write_run(row, 0, np.array([slot], np.int32))

    def _forget_slot(self, row: int, slot: int) -> None:
        if self._second[row] == slot:
            self._second[row] = 0
        else:
            self.table.clear(row, 1)

    def _take_one(self, row: int) -> int:
        """Takes a slot for a row. One must be `available`."""
        if not self.pool.num_free:
            self.num_evicted += self.component.make_room(1)
        if not self.pool.num_free:
            other = self._idle_second_slots()[:1]
            self.pool.free(self._second[other], request_owner(int(other[0])))
            self._second[other] = 0
        return int(self.take(1, request_owner(row))[0])

    @property
    def _rows_change_slots(self) -> bool:
        return self.interval > 0 or bool(np.count_nonzero(self._in_session))

    @property
    def _unclaimed(self) -> int:
        return self.pool.num_free + self.component.evictable

    def _take_second_slot(self, row: int, wanted: bool) -> int:
        """Takes a second slot for a row; 0 if few are left for snapshots, or if `wanted` and only one is left. A
        session's turn gets one as long as there is any that no request waits for."""
        if self._in_session[row]:
            return self._take_one(row) if self._unclaimed > wanted else 0
        if self._unclaimed <= max(self.pool.total // _LEFT_TO_SNAPSHOTS, wanted):
            return 0
        return self._take_one(row) if self.component.has_room_on_trial() else 0

    def _idle_second_slots(self) -> NDArray[np.intp]:
        """Rows whose second slot no step in flight reads; turns of sessions last."""
        if not self._rows_change_slots:
            return np.zeros(0, np.intp)
        idle = np.flatnonzero((self._second > 0) & (self._second_step <= self._finished_step))
        return idle[np.argsort(self._in_session[idle], kind="stable")] if len(idle) > 1 else idle
