"""Faults that other engines shipped, planted one by one: the simulator or the page ledger must catch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.simulated_conversations import ConversationSimulation
from helpers.simulated_doubt import DoubtSimulation, ShortenedSimulation
from helpers.simulation import STATE, WITH_STATES, PoolingSimulation, Simulation, Strategy, simulate
from hypothesis import strategies as st

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.config import SchedulePolicy
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.group import FullGroup, Group, WindowGroup
from sglang_jax.mem_cache.invariants import InvariantError
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.kv_validation import KVValidation
from sglang_jax.mem_cache.ledger import RETIRED, OwnershipError, request_owners
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.radix_tree import Node, Probe, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.state import States
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.mem_cache.window_kv import WindowKV
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import Int32, PageDeltas, SlotCopies, StepPlan, StepResult
from sglang_jax.scheduler.admission import Admission
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.non_finite_check import NonFiniteCheck
from sglang_jax.scheduler.planner import PlannedStep, Planner
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.result_processor import ResultProcessor
from sglang_jax.scheduler.rows import Advance, Departure, Rows

pytestmark = pytest.mark.slow

SCHEDULES = 2000

ONE_POOL = {"groups": st.just((None,))}
STATES = {"groups": st.sampled_from(WITH_STATES), "reuse": st.just(True)}
WINDOWS = {"groups": st.sampled_from([(None, 7), (None, 18), (5,), (3, 20)])}

NO_DRAFTS = {"drafts": st.just(0)}
MANY_DRAFTS = {"drafts": st.sampled_from([1, 4])}


def skip_unlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "unlock", lambda self, node: None)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCache.release_kv_cache

    def release_twice(self: KVCache, record: RowKV, tokens: bytes, *, insert: bool, kept: None) -> None:
        first = record.cache_protected_len // self.page_size
        group = self.groups[0]
        pages = group.table.run(record.row, first, self.pages_for(record.kv_allocated_len))
        release(self, record, tokens, insert=insert)
        group.pool.free(pages, (record.row << 3) | 2)

    monkeypatch.setattr(KVCache, "release_kv_cache", release_twice)


def protect_a_page_less(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_prefix = KVCache.cache_prefix

    def cache_and_forget(self: KVCache, record: RowKV, tokens: bytes, length: int, step: int | None) -> None:
        before = record.cache_protected_len
        cache_prefix(self, record, tokens, length, step)
        if record.cache_protected_len > before:
            self.lengths.cache_protected[record.row] -= self.page_size

    monkeypatch.setattr(KVCache, "cache_prefix", cache_and_forget)


def protect_a_page_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matched length is taken for the locked one: the page of the unaligned tail has no owner."""
    release = KVCache.release_kv_cache

    def release_less(self: KVCache, record: RowKV, tokens: bytes, *, insert: bool, kept: None) -> None:
        ceiling = self.pages_for(record.kv_committed_len) * self.page_size
        if not insert:
            self.lengths.cache_protected[record.row] = ceiling
        release(self, record, tokens, insert=insert)

    monkeypatch.setattr(KVCache, "release_kv_cache", release_less)


def release_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished request's row and pages are released while the step in flight still uses them."""
    monkeypatch.setattr(Rows, "_done", lambda self, row: True)


def free_duplicates_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own copy of a shared prefix is freed while the step in flight reads it."""
    retire = Group._retire
    monkeypatch.setattr(Group, "_retire", lambda self, pages, owner, step: retire(self, pages, owner, None))
    monkeypatch.setattr("sglang_jax.scheduler.admission.Admission._should_wait", lambda self, *arguments: False)


def lose_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PageTable.take_deltas

    def take_all_but_the_last(self: PageTable) -> PageDeltas:
        deltas = take(self)
        return deltas[:-1]

    monkeypatch.setattr(PageTable, "take_deltas", take_all_but_the_last)


def commit_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sampled token counts as committed, though its KV was never written."""
    publish = Publisher.tokens

    def publish_and_commit(self: Publisher, rows: np.ndarray, *arguments: Any) -> None:
        publish(self, rows, *arguments)
        for row in rows.tolist():
            record = self._rows.at(row).record
            record.lengths.kv_committed[row] = self._rows.num_tokens[row]

    monkeypatch.setattr(Publisher, "tokens", publish_and_commit)


def settle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the page runs that a step kept from being freed, only one is freed. There are several where sharers do not
    wait."""

    def settle(self: Group, step: int) -> None:
        if self._retired and self._retired[0][0] <= step:
            self.pool.free(self._retired.popleft()[1], RETIRED)

    monkeypatch.setattr(Group, "settle", settle)
    monkeypatch.setattr("sglang_jax.scheduler.admission.Admission._should_wait", lambda self, *arguments: False)


def no_look_after_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = Rows._give_back

    def give_back_quietly(self: Rows, departure: Departure) -> None:
        queues = (self._queue._others, self._queue._background)
        pauses = [queue._pause for queue in queues]
        give_back(self, departure)
        for queue, pause in zip(queues, pauses, strict=True) if not departure.requeue else ():
            queue.pause(pause)

    monkeypatch.setattr(Rows, "_give_back", give_back_quietly)


def no_look_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request is considered again when something changes, and not after a number of steps."""
    monkeypatch.setattr("sglang_jax.scheduler.admission.RETRY_STEPS", 10**6)


def share_by_the_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose first page is that of a prompt in progress waits for all of that prompt, wherever they
    diverge."""

    def should_wait(self: Admission, request: Request, probe: Probe, look: Any) -> bool:
        page = self._cache.page_size * 4
        return any(one.tokens[:page] == request.tokens[:page] for one in self._rows.prefilling)

    monkeypatch.setattr(Admission, "_should_wait", should_wait)


def match_in_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = KVCache.probe
    monkeypatch.setattr(KVCache, "probe", lambda self, tokens, limit, namespace: probe(self, tokens, limit, None))


def insert_into_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = RadixTree.insert

    def insert_without(self: RadixTree, below: Node, *arguments: Any) -> Any:
        return insert(self, self.root(None) if below.parent is None else below, *arguments)

    monkeypatch.setattr(RadixTree, "insert", insert_without)


def forget_to_clear_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PageTable.clear
    monkeypatch.setattr(PageTable, "clear", lambda self, row, columns: clear(self, row, max(columns - 1, 0)))


def match_what_a_failed_request_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVValidation, "distrust", lambda self, record: None)


def fail_readers_of_bad_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVValidation, "read_bad_kv", staticmethod(lambda record: False))


def no_turn_for_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    seat = Admission._seat

    def seat_and_forget(self: Admission, *arguments: Any) -> None:
        seat(self, *arguments)
        self._younger_seats = 0

    monkeypatch.setattr(Admission, "_seat", seat_and_forget)


def never_keep_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that does not fit is overtaken forever."""
    monkeypatch.setattr(Admission, "_keeps_room", lambda self, request, step: False)


def keep_room_for_a_crowd_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is kept after a number of overtakings, and not after a number of steps."""

    def keeps_room(self: Admission, request: Request, step: int) -> bool:
        return request.waiting.refused_at is not None and request.waiting.overtaken_by >= self.backfill_seats

    monkeypatch.setattr(Admission, "_keeps_room", keeps_room)


def keep_what_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad KV that a request depends on is not freed when the request ends."""
    unpin = FullKV.unpin

    def unpin_what_lives(self: FullKV, node: Node) -> None:
        if node.dead:
            self.protected -= node.length
        else:
            unpin(self, node)

    monkeypatch.setattr(FullKV, "unpin", unpin_what_lives)


def miscount_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "pages_for", lambda self, tokens: tokens // self.page_size + 1)


def reclaim_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages behind a window are freed while the step in flight still reads them."""

    def let_go(self: KVCache, rows: np.ndarray, *, tight: bool = False) -> None:
        for group in self._shrinking:
            group.let_go(rows, self.lengths.kv_allocated[rows], self.open_rows, tight)

    monkeypatch.setattr(KVCache, "let_go", let_go)


def keep_nothing_for_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is a page shorter than it should be."""
    let_go = WindowGroup.let_go

    def let_go_more(self: WindowGroup, rows: np.ndarray, reading: np.ndarray, *arguments: Any) -> None:
        let_go(self, rows, reading + self.page_size, *arguments)

    monkeypatch.setattr(WindowGroup, "let_go", let_go_more)


def reach_no_further_than_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a window begins within a page, the match takes that page for gone."""
    init = WindowKV.__init__

    def init_short(self: WindowKV, pool: Any, *arguments: Any) -> None:
        init(self, pool, *arguments)
        self.reach = max((self.window - 1) // pool.page_size, 1)

    monkeypatch.setattr(WindowKV, "__init__", init_short)


def match_over_a_tombstone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowKV, "last_start", lambda self, passed, index: index)


def cover_a_page_less(monkeypatch: pytest.MonkeyPatch) -> None:
    cover, uncover = WindowKV.cover, WindowKV.uncover
    monkeypatch.setattr(WindowKV, "cover", lambda self, node, count: cover(self, node, count - 1))
    monkeypatch.setattr(WindowKV, "uncover", lambda self, node, count: uncover(self, node, count - 1))


def keep_what_one_group_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group's pages are allocated before the second one refuses."""
    grow = KVCache._grow

    def grow_the_first(self: KVCache, rows: np.ndarray, columns: np.ndarray) -> bool:
        if not grow(self, rows, columns):
            first = self.groups[0]
            if len(self.groups) > 1 and len(columns) <= first.pool.num_free:
                first.table.write(rows, columns, first.take(len(columns), request_owners(rows)))
            return False
        return True

    monkeypatch.setattr(KVCache, "_grow", grow_the_first)


def tell_one_group_of_a_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = RadixTree._remove_leaf

    def remove_from_the_first(self: RadixTree, node: Node) -> Node:
        components, self.components = self.components, self.components[:1]
        parent = remove(self, node)
        self.components = components
        return parent

    monkeypatch.setattr(RadixTree, "_remove_leaf", remove_from_the_first)


def tell_one_of_two_full_groups_of_a_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pool's pages stay evictable forever, and no node holds them."""
    tell_one_group_of_a_removal(monkeypatch)


def tell_one_group_of_a_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = RadixTree._trim_leaf

    def trim_the_first(self: RadixTree, node: Node, pages: int) -> bool:
        components, self.components = self.components, self.components[:1]
        serves = trim(self, node, pages)
        self.components = components
        return serves

    monkeypatch.setattr(RadixTree, "_trim_leaf", trim_the_first)


def keep_what_one_group_granted_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `keep_what_one_group_granted`, for rows that get pages for several tokens."""
    extend = KVCache.extend_rows

    def extend_the_first(self: KVCache, rows: np.ndarray, lengths: np.ndarray, *, evict: bool = True) -> bool:
        if extend(self, rows, lengths, evict=evict):
            return True
        first, row = self.groups[0], rows[:1]
        column = -(-self.lengths.kv_allocated[row] // self.page_size)
        if lengths[0] > self.lengths.kv_allocated[row[0]] and first.pool.num_free:
            first.table.write(row, column, first.take(1, request_owners(row)))
        return False

    monkeypatch.setattr(KVCache, "extend_rows", extend_the_first)


def budget_a_window_like_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is kept in a window's pool for all of an output: few rows run where many would fit."""
    monkeypatch.setattr(WindowGroup, "output_need", FullGroup.output_need)


def give_a_node_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's pages go both to a node that has its own and to the retired pages."""
    share = WindowGroup._repoint

    def repoint(self: WindowGroup, row: int, node: Node, first: int, own: np.ndarray, there: int, step: Any) -> bool:
        return share(self, row, node, first, own, max(there - 1, 0), step)

    monkeypatch.setattr(WindowGroup, "_repoint", repoint)


def insert_the_uncommitted_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sampled token goes into the tree, though its KV was never written."""
    give_back = Rows._give_back

    def give_back_all(self: Rows, departure: Departure) -> None:
        record, known = departure.request.record, int(self.num_tokens[departure.request.row])
        if departure.insert and (known <= record.kv_allocated_len or self._cache.extend_row(record, known)):
            record.lengths.kv_committed[record.row] = known
        give_back(self, departure)

    monkeypatch.setattr(Rows, "_give_back", give_back_all)


def retire_in_one_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates in the second group are freed at once, though the step in flight writes them."""
    retire = Group._retire
    monkeypatch.setattr(
        WindowGroup, "_retire", lambda self, pages, owner, step: retire(self, pages, owner, None), raising=False
    )
    monkeypatch.setattr("sglang_jax.scheduler.admission.Admission._should_wait", lambda self, *arguments: False)


def doubt_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowGroup, "in_doubt", lambda self, record, node, last: False)


def keep_what_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row frees no pages behind its window until pages are short."""
    let_go = KVCache.let_go
    monkeypatch.setattr(KVCache, "let_go", lambda self, rows, *, tight=False: let_go(self, rows[:0], tight=tight))


def count_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows keep the length that was planned."""
    monkeypatch.setattr(KVCache, "shorten", lambda self, rows, widths, counts: None)


def begin_where_the_host_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row continues at the largest length that it may have."""
    length_on_device = Planner._lengths_on_device

    def none_is(self: Planner, rows: np.ndarray) -> np.ndarray | None:
        found = length_on_device(self, rows)
        return None if found is None else np.zeros_like(found)

    monkeypatch.setattr(Planner, "_lengths_on_device", none_is)


def keep_what_is_behind_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Rows.advance

    def advance_by_all(self: Rows, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> Advance:
        kept = advance(self, rows, tokens, counts)
        most = np.minimum(counts, self.total_len[rows] - kept.num_tokens + kept.kept)
        return msgspec.structs.replace(kept, kept=most.astype(np.int32))

    monkeypatch.setattr(Rows, "advance", advance_by_all)


def reclaim_behind_the_furthest_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages behind the window of the furthest query are freed, which is further on than the row may be."""

    def let_go(self: KVCache, rows: np.ndarray, *, tight: bool = False) -> None:
        reading = (self.lengths.first_query if self.in_flight else self.lengths.kv_committed)[rows]
        for group in self._shrinking:
            group.let_go(rows, reading, self.open_rows, tight)

    monkeypatch.setattr(KVCache, "let_go", let_go)


def donate_a_state_of_the_wrong_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at a chunk's end is inserted at the end of the last whole page."""
    monkeypatch.setattr(StateGroup, "_worth_a_slot", lambda self, record, length: length > record.state_len)
    monkeypatch.setattr(StateGroup, "chunk_end", lambda self, record, start, end, total: end)


def copy_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, copy = FakeRunner._run, FakeRunner._copy

    def run_then_copy(self: FakeRunner, plan: StepPlan, *arguments: Any) -> StepResult:
        result = run(self, plan, *arguments)
        copy(self, plan)
        return result

    monkeypatch.setattr(FakeRunner, "_run", run_then_copy)
    monkeypatch.setattr(FakeRunner, "_copy", lambda self, plan: None)


def copy_after_a_step_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_after_the_step(monkeypatch)


def begin_behind_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state takes in every draft, accepted or rejected."""
    monkeypatch.setattr(FakeRunner, "_kept_tokens", staticmethod(lambda tokens, drafts, sampled: tokens))


def begin_a_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the last accepted draft is taken for the one behind it."""

    def kept(tokens: int, drafts: int, sampled: int) -> int:
        return tokens - drafts + max(sampled - 2, 0)

    monkeypatch.setattr(FakeRunner, "_kept_tokens", staticmethod(kept))


def keep_a_state_where_drafts_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that reaches a boundary only if all drafts in flight are accepted leaves its state there as that
    boundary's."""
    monkeypatch.setattr(StateGroup, "most_queries", lambda self, rows: np.full(len(rows), 2**31 - 1))


def keep_a_state_beyond_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's own slot is taken for the state at the end of its output, though drafts behind a stop token have run."""
    keep_a_state_beyond_the_end(monkeypatch)


def lose_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StateGroup.take_copies

    def take_all_but_the_last(self: StateGroup, rows: np.ndarray, step: int) -> tuple[SlotCopies, ...]:
        return tuple(
            SlotCopies(copies.pool, copies.sources[:-1], copies.targets[:-1]) for copies in take(self, rows, step)
        )

    monkeypatch.setattr(StateGroup, "take_copies", take_all_but_the_last)


def keep_the_slot_of_a_request_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends between admission and its first step releases nothing that the match took."""
    release = StateGroup.release

    def release_what_began(self: StateGroup, record: RowKV, allocated: int) -> None:
        if record.row not in self._pinned:
            release(self, record, allocated)

    monkeypatch.setattr(StateGroup, "release", release_what_began)


def keep_the_pin_of_a_request_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    release = StateGroup.release

    def release_without_the_pin(self: StateGroup, record: RowKV, allocated: int) -> None:
        self._pinned.pop(record.row, None)
        release(self, record, allocated)

    monkeypatch.setattr(StateGroup, "release", release_without_the_pin)


def snapshot_a_page_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at a boundary that decoding passes is taken for that of the boundary before."""
    change = StateGroup.cross_boundary

    def change_a_page_later(self: StateGroup, rows: np.ndarray, lengths: np.ndarray, *others: Any) -> None:
        before = self._second.copy()
        change(self, rows, lengths, *others)
        moved = (self._second != before) & (self._second_len > self.page_size)
        self._second_len[moved] -= self.page_size

    monkeypatch.setattr(StateGroup, "cross_boundary", change_a_page_later)


def keep_a_state_beyond_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's own slot is taken for the state of its committed tokens, though one step more has run."""

    def ends_on_boundary(self: StateGroup, record: RowKV) -> bool:
        return not self._sources[record.row] and record.kv_committed_len % self.page_size == 0

    monkeypatch.setattr(StateGroup, "_ends_on_boundary", ends_on_boundary)


def match_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "last_start", lambda self, passed, index: index)


def split_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper part of a split node gets the state, and the lower part has none."""

    def split(self: States, upper: Node, lower: Node) -> None:
        upper.values.append(lower.values[self._index])
        lower.values[self._index] = None

    monkeypatch.setattr(States, "split", split)


def let_go_of_a_source_at_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot may be evicted while the step that resumes from it is in flight."""
    take = StateGroup.take_copies

    def take_and_let_go(self: StateGroup, rows: np.ndarray, step: int) -> tuple[SlotCopies, ...]:
        copies = take(self, rows, step)
        while self._starting:
            self._let_go(self._starting.popleft()[1])
        return copies

    monkeypatch.setattr(StateGroup, "take_copies", take_and_let_go)


def doubt_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateGroup, "in_doubt", lambda self, record, node, last: False)


def keep_a_state_beyond_a_leafs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that loses its tail keeps the state after that tail."""
    monkeypatch.setattr(States, "trim", lambda self, node, pages: False)


def prove_what_no_sample_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of a window's layers count as valid, not only those of the last window."""

    def prove(self: WindowGroup, record: RowKV) -> None:
        self.component.prove(record.locked_node, record.cache_protected_len // self.page_size)

    monkeypatch.setattr(WindowGroup, "prove", prove)


def prove_what_is_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper part of a split node counts as valid wherever it has pages."""
    split = WindowKV.split

    def split_and_prove(self: WindowKV, upper: Node, lower: Node) -> None:
        split(self, upper, lower)
        held = self.held(upper)
        held.proven = len(held.pages)

    monkeypatch.setattr(WindowKV, "split", split_and_prove)


def prove_the_head_of_what_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that loses its valid end keeps as many valid pages as before."""
    trim = WindowKV.trim

    def trim_and_prove(self: WindowKV, node: Node, pages: int) -> bool:
        proven = self.held(node).proven
        serves = trim(self, node, pages)
        self.held(node).proven = min(proven, len(self.held(node).pages))
        return serves

    monkeypatch.setattr(WindowKV, "trim", trim_and_prove)


def prove_the_copy_that_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row was switched to shared pages as its step was launched: its first sample validates those pages, which it did
    not read."""
    prove = KVValidation.prove
    monkeypatch.setattr(KVValidation, "prove", lambda self, record, step: prove(self, record, step + 1))


def keep_parts_after_a_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    requeue = Finisher.requeue

    def requeue_with_parts(self: Finisher, request: Request) -> None:
        parts = request.pooled
        requeue(self, request)
        request.pooled = parts

    monkeypatch.setattr(Finisher, "requeue", requeue_with_parts)


def sum_without_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pooling, "needs_all_tokens", False)


def publish_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors and scores of tokens are not checked."""
    find = NonFiniteCheck._find_not_finite

    def find_without(self: NonFiniteCheck, planned: PlannedStep, result: StepResult, last: Int32) -> list[Request]:
        return find(self, msgspec.structs.replace(planned, pooled_chunks=()), replace(result, pooled=()), last)

    monkeypatch.setattr(NonFiniteCheck, "_find_not_finite", find_without)


def take_the_part_of_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_has_part", lambda self, chunk: chunk.start == 0)


def take_the_part_of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ResultProcessor._add_pooled

    def add_in_another_order(self: ResultProcessor, planned: PlannedStep, result: StepResult) -> None:
        add(self, planned, replace(result, pooled=result.pooled[::-1]))

    monkeypatch.setattr(ResultProcessor, "_add_pooled", add_in_another_order)


def divide_by_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean is the sum divided by the length of the last chunk."""
    process = ResultProcessor._add_pooled

    def add_and_scale(self: ResultProcessor, planned: PlannedStep, result: StepResult) -> None:
        process(self, planned, result)
        for chunk in planned.pooled_chunks:
            request = chunk.request
            if self._pooling is Pooling.MEAN and chunk.last and request.pooled is not None:
                request.pooled = request.pooled * (request.prompt_len / chunk.length)

    monkeypatch.setattr(ResultProcessor, "_add_pooled", add_and_scale)


POOLING_FAULTS: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Strategy]] = {
    keep_parts_after_a_retraction: {"pooling": st.just(Pooling.MEAN)},
    sum_without_cached_tokens: {"pooling": st.just(Pooling.MEAN)},
    publish_what_is_not_finite: {"pooling": st.sampled_from([None, *Pooling])},
    take_the_part_of_the_first_chunk: {"pooling": st.just(Pooling.LAST)},
    take_the_part_of_another_request: {"pooling": st.sampled_from([None, *Pooling])},
    divide_by_the_last_chunk: {"pooling": st.just(Pooling.MEAN)},
}
"""Faults of vectors and of scores of tokens, and the engines that show them."""


STATE_FAULTS = [
    donate_a_state_of_the_wrong_length,
    copy_after_the_step,
    lose_a_copy,
    keep_the_slot_of_a_request_that_never_ran,
    keep_the_pin_of_a_request_that_never_ran,
    snapshot_a_page_off,
    keep_a_state_beyond_the_end,
    match_without_a_state,
    split_keeps_the_state,
    let_go_of_a_source_at_the_launch,
    doubt_no_state,
    keep_a_state_beyond_a_leafs_end,
]

DRAFT_FAULTS = [
    count_rejected_drafts,
    begin_where_the_host_thinks,
    keep_what_is_behind_a_stop,
    reclaim_behind_the_furthest_draft,
]

STATE_DRAFT_FAULTS = [
    copy_after_a_step_with_drafts,
    begin_behind_all_drafts,
    begin_a_token_early,
    keep_a_state_where_drafts_may_end,
    keep_a_state_beyond_a_stop,
]

WINDOW_FAULTS = [
    doubt_no_window,
    keep_what_is_behind,
    reclaim_a_step_early,
    keep_nothing_for_the_next_page,
    match_over_a_tombstone,
    reach_no_further_than_whole_pages,
    cover_a_page_less,
    keep_what_one_group_granted,
    tell_one_group_of_a_removal,
    tell_one_of_two_full_groups_of_a_removal,
    tell_one_group_of_a_trim,
    keep_what_one_group_granted_for_drafts,
    budget_a_window_like_all,
    give_a_node_what_it_has,
    insert_the_uncommitted_tail,
    retire_in_one_group_only,
    prove_what_no_sample_read,
    prove_what_is_split_off,
    prove_the_head_of_what_is_shortened,
]

FAULTS = [
    skip_unlock,
    free_twice,
    protect_a_page_less,
    protect_a_page_more,
    release_while_in_flight,
    free_duplicates_while_in_flight,
    lose_a_delta,
    commit_the_last_token,
    settle_one,
    no_look_after_a_release,
    no_look_after_a_refusal,
    share_by_the_first_page,
    match_in_another_namespace,
    insert_into_another_namespace,
    forget_to_clear_a_row,
    match_what_a_failed_request_wrote,
    fail_readers_of_bad_kv,
    no_turn_for_the_oldest,
    never_keep_room,
    keep_room_for_a_crowd_only,
    keep_what_was_cut_off,
    miscount_what_does_not_fit,
    prove_the_copy_that_was_not_read,
    *WINDOW_FAULTS,
    *STATE_FAULTS,
    *DRAFT_FAULTS,
    *STATE_DRAFT_FAULTS,
]

NO_SHORTAGE: dict[str, Strategy] = {
    "rows": st.integers(3, 6),
    "chunk": st.sampled_from([8, 64]),
    "pages": st.integers(16, 24),
    "page_size": st.sampled_from([4, 16]),
    "siblings": st.integers(16, 24),
    "reuse": st.just(True),
}
"""Most requests run, several at a time, and match each other's prefixes."""

ROOM_FOR_ALL: dict[str, Strategy] = {
    "page_size": st.just(1),
    "pages": st.just(64),
    "siblings": st.just(64),
    "chunk": st.just(64),
}
"""A prompt is computed in one step, and nothing is evicted for it."""

PASSED_BY_SHORT_PROMPTS: dict[str, Strategy] = {
    "aged_turn": st.just(2),
    "backfill": st.just((0, 256)),
    "chunk": st.just(3),
    "rows": st.integers(2, 6),
}
"""All tokens of a step are in demand, so the shortest prompt goes first, even in the order of arrival."""

COMPUTED_TWICE: dict[str, Strategy] = NO_SHORTAGE | {
    "page_size": st.just(4),
    "context": st.just(60),
    "lazy": st.just(True),
    "chunk": st.sampled_from([3, 8]),
}
"""Steps that run late, between chunks of prompts that share a prefix."""

ENDS_ON_PAGES: dict[str, Strategy] = {
    "page_size": st.sampled_from([1, 4]),
    "pages": st.just(64),
    "groups": st.just((None, STATE)),
    "siblings": st.just(64),
    "slots": st.integers(8, 16),
    "chunk": st.just(64),
    "context": st.just(60),
}
"""Outputs leave states behind, and no resource is short."""

ROOM_BESIDE_A_LONG_OUTPUT: dict[str, Strategy] = {
    "page_size": st.just(1),
    "pages": st.just(62),
    "rows": st.integers(3, 6),
    "context": st.just(60),
    "conservativeness": st.just(1.0),
    "reuse": st.just(False),
    "aged_turn": st.just(2),
}
"""An output up to the context length leaves room for a few short requests, and for no other long one."""

PLACES: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Strategy]] = {
    # By the rounding of pages, room for the second appears while only the first is running: for a dozen steps where
    # pages are long and outputs are as long as two of them.
    no_look_after_a_refusal: {
        "page_size": st.just(32),
        "pages": st.just(4),
        "rows": st.just(3),
        "context": st.just(124),
        "conservativeness": st.just(1.0),
        "reuse": st.just(False),
    },
    fail_readers_of_bad_kv: NO_SHORTAGE,
    settle_one: NO_SHORTAGE | {"page_size": st.just(1)},
    free_duplicates_while_in_flight: COMPUTED_TWICE | {"rows": st.just(6)},
    retire_in_one_group_only: COMPUTED_TWICE | {"groups": st.sampled_from([(None, 7), (None, 18), (3, 20)])},
    share_by_the_first_page: NO_SHORTAGE | {"page_size": st.sampled_from([1, 4]), "chunk": st.just(3)},
    no_turn_for_the_oldest: {"aged_turn": st.just(2), "rows": st.integers(1, 2)},
    never_keep_room: ROOM_BESIDE_A_LONG_OUTPUT | {"backfill": st.just((0, 256)), "chunk": st.just(64)},
    keep_room_for_a_crowd_only: ROOM_BESIDE_A_LONG_OUTPUT | {"backfill": st.just((32, 5))},
    keep_what_was_cut_off: NO_SHORTAGE,
    keep_what_one_group_granted: {"groups": st.just((None, 18)), "siblings": st.integers(2, 8)},
    keep_what_one_group_granted_for_drafts: MANY_DRAFTS,
    tell_one_group_of_a_trim: {"groups": st.just((None, 7)), "page_size": st.just(1)},
    reach_no_further_than_whole_pages: NO_SHORTAGE | {"page_size": st.just(4), "groups": st.just((None, 7))},
    tell_one_of_two_full_groups_of_a_removal: {"groups": st.just((None, None))},
    budget_a_window_like_all: {"groups": st.just((None, 7)), "pages": st.just(64), "siblings": st.integers(4, 12)},
    doubt_no_window: NO_SHORTAGE | {"groups": st.sampled_from([(5,), (None, 5)]), "page_size": st.just(4)},
    prove_what_no_sample_read: NO_SHORTAGE | {"groups": st.sampled_from([(5,), (None, 5)]), "page_size": st.just(4)},
    prove_what_is_split_off: NO_SHORTAGE | {"groups": st.sampled_from([(5,), (None, 5), (3,)]), **ROOM_FOR_ALL},
    prove_the_head_of_what_is_shortened: NO_SHORTAGE
    | {"groups": st.sampled_from([(None, 5), (None, 7)]), **ROOM_FOR_ALL},
    prove_the_copy_that_was_not_read: NO_SHORTAGE,
    # The tail is whole pages, so the tree takes it, and a request that continues from it comes soon.
    insert_the_uncommitted_tail: NO_SHORTAGE | {"page_size": st.just(1), **ROOM_FOR_ALL},
    keep_what_is_behind_a_stop: NO_SHORTAGE | {"drafts": st.just(4)},
    reclaim_behind_the_furthest_draft: WINDOWS | {"drafts": st.just(4)},
    keep_a_state_beyond_the_end: {
        "page_size": st.just(1),
        "pages": st.just(64),
        "groups": st.just((None, STATE)),
        "slots": st.integers(4, 16),
        "chunk": st.just(64),
        "track": st.just(0),
    },
    # Pages of several tokens: with one token a page, a continuing row restates where its state is, which is correct.
    keep_a_state_where_drafts_may_end: ENDS_ON_PAGES | {"track": st.just(1), "page_size": st.just(4)},
    keep_a_state_beyond_a_stop: ENDS_ON_PAGES
    | {"track": st.just(0), "page_size": st.just(1)}
    | {"rows": st.just(4), "slots": st.just(16), "lazy": st.just(True), "drafts": st.just(1)},
    snapshot_a_page_off: ENDS_ON_PAGES | {"track": st.just(1), "page_size": st.just(4)},
    let_go_of_a_source_at_the_launch: {
        "page_size": st.just(1),
        "pages": st.integers(4, 24),
        "slots": st.integers(2, 5),
        "rows": st.integers(2, 6),
        "lazy": st.just(True),
    },
    doubt_no_state: {
        "page_size": st.just(1),
        "pages": st.just(64),
        "groups": st.just((None, STATE)),
        "slots": st.just(16),
        "chunk": st.just(64),
    },
    keep_a_state_beyond_a_leafs_end: {
        "groups": st.just((None, STATE)),
        "slots": st.integers(8, 16),
        "chunk": st.just(64),
    },
}
"""Sizes with which the fault shows, where few of those in `SIZES` would do."""

KINDS: dict[Callable[[pytest.MonkeyPatch], None], type[Simulation]] = {
    doubt_no_window: DoubtSimulation,
    prove_what_no_sample_read: DoubtSimulation,
    prove_what_is_split_off: DoubtSimulation,
    prove_the_head_of_what_is_shortened: ShortenedSimulation,
    prove_the_copy_that_was_not_read: DoubtSimulation,
    snapshot_a_page_off: ConversationSimulation,
    keep_a_state_where_drafts_may_end: ConversationSimulation,
    keep_a_state_beyond_a_stop: ConversationSimulation,
    keep_a_state_beyond_the_end: ConversationSimulation,
}
"""The class whose schedules meet the fault, where those of `Simulation` do not."""


@pytest.mark.soak
@pytest.mark.parametrize("plant", PLACES, ids=lambda plant: plant.__name__)
def test_sizes_that_show_a_fault_pass_without_it(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    simulate(SCHEDULES, known_fault=True, sizes=PLACES[plant], kind=KINDS.get(plant, Simulation))


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_overtaking_without_end_is_caught_under_each_policy(
    policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_turn_for_the_oldest(monkeypatch)
    sizes = ONE_POOL | NO_DRAFTS | PASSED_BY_SHORT_PROMPTS | {"policy": st.just(policy)}
    with pytest.raises(AssertionError, match="was overtaken too often"):
        simulate(SCHEDULES, known_fault=True, sizes=sizes)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with_states, with_drafts = (*STATE_FAULTS, *STATE_DRAFT_FAULTS), (*DRAFT_FAULTS, *STATE_DRAFT_FAULTS)
    sizes = WINDOWS if plant in WINDOW_FAULTS else STATES if plant in with_states else ONE_POOL
    sizes = sizes | (MANY_DRAFTS if plant in with_drafts else NO_DRAFTS)
    sizes = sizes | PLACES.get(plant, {})
    with pytest.raises((OwnershipError, InvariantError, AssertionError, RuntimeError, LookupError)) as caught:
        simulate(SCHEDULES, known_fault=True, sizes=sizes, kind=KINDS.get(plant, Simulation))
    assert caught.traceback[-1].path != Path(__file__), "the fault itself failed, and nobody noticed it"


@pytest.mark.parametrize("plant", POOLING_FAULTS, ids=lambda plant: plant.__name__)
def test_fault_of_vectors_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        simulate(SCHEDULES, known_fault=True, sizes=POOLING_FAULTS[plant], kind=PoolingSimulation)
    assert caught.traceback[-1].path != Path(__file__), "the fault itself failed, and nobody noticed it"


def match_over_a_tombstone_unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `match_over_a_tombstone`, without the check that would catch a match over freed pages."""
    match_over_a_tombstone(monkeypatch)

    def cover(self: WindowKV, node: Node, count: int, *, session: bool = False) -> None:
        while count > 0 and node.parent is not None:
            value, here = self.held(node), min(count, node.length)
            value.covers[here] = value.covers.get(here, 0) + 1
            value.covered = max(value.covered, here)
            count, node = count - here, node.parent

    monkeypatch.setattr(WindowKV, "cover", cover)


class OutputsOnly(Simulation):
    """Checks only the outputs of requests."""

    def teardown(self) -> None:
        self.bench.run()
        self.bench.check_outputs()


@pytest.mark.parametrize(
    "plant", [reclaim_a_step_early, match_over_a_tombstone_unguarded], ids=lambda each: each.__name__
)
def test_outputs_show_the_fault_without_any_check_of_memory(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freed page changes what is sampled, even without checks of pages."""
    plant(monkeypatch)
    monkeypatch.setattr("helpers.watch.check_everything", lambda cache: None)
    monkeypatch.setattr("helpers.watch.Watch._check_windows", lambda self: None)
    monkeypatch.setattr("helpers.simulation.check_everything", lambda cache: None)
    room = {"page_size": st.just(1), "pages": st.just(400), "siblings": st.just(400), "chunk": st.just(8)}
    sizes = WINDOWS | NO_DRAFTS | NO_SHORTAGE | room
    with pytest.raises(AssertionError, match=r"^request \d+"):
        simulate(SCHEDULES, known_fault=True, sizes=sizes, kind=OutputsOnly)
