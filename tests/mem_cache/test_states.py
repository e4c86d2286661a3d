"""Slots of recurrent state: their owners, where matches end, what is evicted, what is copied and when."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.caches import int32_bytes

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.invariants import InvariantError, check_everything
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.ledger import OwnershipError
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.runner.plan import PoolSpec

PAGE = 4
PROMPT = list(range(1, 31))
"""Seven pages and a half."""


def cache_of(slots: int = 8, pages: int = 60, rows: int = 4, track: int = PAGE, reuse: bool = True) -> KVCache:
    """Full attention, and states in `slots` slots; each snapshot is worth its cost."""
    pools = (PoolSpec("full", CacheKind.FULL, pages + 1, PAGE), PoolSpec("mamba", CacheKind.STATE, slots + 1, PAGE))
    cache = KVCache(pools, rows, 200, state_interval=track, reuse=reuse, debug=True)
    states_of(cache).least_gain = 1
    return cache


def states_of(cache: KVCache) -> StateGroup:
    (states,) = (group for group in cache.groups if isinstance(group, StateGroup))
    return states


def open_row(cache: KVCache, tokens: list[int]) -> RowKV:
    record = cache.open_row(cache.probe(int32_bytes(tokens), len(tokens) - 1, None))
    check_everything(cache)
    return record


def copied(cache: KVCache, record: RowKV, step: int) -> list[tuple[int, int]]:
    """The copies of a step with only this row."""
    copies = cache.take_copies(np.array([record.row], np.int32), step)
    check_everything(cache)
    return [pair for one in copies for pair in zip(one.sources.tolist(), one.targets.tolist(), strict=True)]


def slot_of(cache: KVCache, record: RowKV) -> int:
    return int(states_of(cache).table.pages[record.row, 0])


def compute(cache: KVCache, record: RowKV, tokens: list[int], step: int = 0) -> int:
    """Prefills a row as the planner would, one chunk per step; the next step's number."""
    start = record.kv_committed_len
    while start < len(tokens):
        end = cache.chunk_end(record, start, len(tokens), len(tokens))
        assert cache.extend_row(record, end)
        copied(cache, record, step)
        cache.launched(step)
        cache.lengths.kv_committed[record.row] = end
        cache.cache_prefix(record, int32_bytes(tokens), end, step)
        check_everything(cache)
        cache.settle(step)
        check_everything(cache)
        start, step = end, step + 1
    return step


def decode(cache: KVCache, record: RowKV, count: int, step: int) -> int:
    """Steps of one token each, with one in flight while the next is planned; the next step's number."""
    rows = np.array([record.row], np.int32)
    for number in range(step, step + count):
        lengths = cache.extend_decode(rows)
        assert lengths is not None
        copied(cache, record, number)
        cache.launched(number)
        cache.settle(number - 1)
        cache.lengths.kv_committed[record.row] = lengths[0]
        check_everything(cache)
    cache.settle(step + count - 1)
    return step + count


def finish(cache: KVCache, record: RowKV, tokens: list[int], insert: bool = True) -> None:
    cache.release_kv_cache(record, int32_bytes(tokens), insert=insert)
    check_everything(cache)


def run(cache: KVCache, tokens: list[int]) -> None:
    """A request that computes its prompt and ends."""
    record = open_row(cache, tokens)
    compute(cache, record, tokens)
    finish(cache, record, tokens)


def cached(cache: KVCache, tokens: list[int]) -> int:
    return cache.peek(int32_bytes(tokens), len(tokens), None)


def test_a_prompt_leaves_a_state_where_the_same_prompt_may_resume() -> None:
    """One token must run to give logits: the state is kept before the last one, even when the prompt ends at a page
    boundary."""
    for length, kept in ((30, 28), (28, 24), (29, 28), (5, 4), (4, 0)):
        cache = cache_of()
        run(cache, PROMPT[:length])
        assert cached(cache, PROMPT[: length - 1]) == kept


def test_a_match_ends_at_a_state_and_leaves_no_split_behind() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    other = [*PROMPT[:14], 99, 98, 97]
    probe = cache.probe(int32_bytes(other), len(other) - 1, None)
    assert (probe.length, probe.known) == (0, 12)
    nodes = cache.tree.num_nodes
    record = cache.open_row(probe)
    assert cache.tree.num_nodes == nodes
    assert record.branches == [12], "its chunk is to end where it parts from what is cached"
    assert cache.chunk_end(record, 0, 17, 17) == 12
    finish(cache, record, other, insert=False)
    assert states_of(cache).pool.num_free == 7


def test_a_diverging_request_leaves_its_state_where_it_diverged() -> None:
    """A split leaves no state in the upper part; the second sharer hits."""
    cache = cache_of()
    run(cache, PROMPT)
    run(cache, [*PROMPT[:14], 99, 98, 97])
    assert cached(cache, PROMPT[:12]) == 12
    assert cached(cache, [*PROMPT[:13], 77, 77, 77]) == 12
    assert cached(cache, PROMPT) == 28, "the first one's state is where it was"


def test_a_hit_copies_the_state_before_the_first_step_and_pins_its_source_until_then() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    states = states_of(cache)
    record = open_row(cache, PROMPT)
    assert (states.component.evictable, states.component.protected) == (0, 1)
    (pair,) = copied(cache, record, 7)
    assert pair[1] == slot_of(cache, record)
    assert copied(cache, record, 8) == [], "once"
    cache.launched(7)
    assert cache.tree.evict(states.component, 1) == 0, "the step in flight reads it"
    cache.settle(7)
    assert states.component.protected == 0
    assert cache.tree.evict(states.component, 1) == 1, "the row has begun, and needs it no longer"
    finish(cache, record, PROMPT)


def test_a_request_that_ends_before_its_first_step_releases_all_that_its_match_took() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    states = states_of(cache)
    before = (states.pool.num_free, states.component.evictable, states.component.protected)
    record = open_row(cache, PROMPT)
    finish(cache, record, PROMPT, insert=False)
    assert (states.pool.num_free, states.component.evictable, states.component.protected) == before
    assert copied(cache, open_row(cache, [50, 51]), 0) == [], "nothing is copied for who took the row next"


def test_many_requests_resume_from_one_state() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    records = [open_row(cache, [*PROMPT, 60 + k]) for k in range(4)]
    rows = np.array([record.row for record in records], np.int32)
    (copies,) = cache.take_copies(rows, 5)
    assert len(set(copies.sources.tolist())) == 1
    assert sorted(copies.targets.tolist()) == sorted(slot_of(cache, record) for record in records)
    cache.launched(5)
    finish_order = [records[2], records[0], records[3], records[1]]
    cache.settle(5)
    for record in finish_order:
        finish(cache, record, PROMPT, insert=False)


def test_the_last_slot_is_taken_over_without_a_copy() -> None:
    """A single running request must never wait for a slot that only its own prefix uses."""
    cache = cache_of(slots=1)
    record = open_row(cache, PROMPT[:8])
    step = compute(cache, record, PROMPT[:8])
    assert cached(cache, PROMPT) == 0, "no slot to go on in, so none is given away"
    finish(cache, record, PROMPT[:8])
    assert cached(cache, PROMPT) == 8, "but at the end it is"
    again = open_row(cache, PROMPT)
    assert again.kv_committed_len == 8
    assert copied(cache, again, step) == []
    assert states_of(cache).available == 0
    compute(cache, again, PROMPT, step)
    finish(cache, again, PROMPT)


def test_a_row_continues_in_another_slot_once_its_own_is_a_snapshot() -> None:
    cache = cache_of()
    record = open_row(cache, PROMPT)
    first = slot_of(cache, record)
    assert cache.extend_row(record, 28)
    cache.launched(0)
    cache.lengths.kv_committed[record.row] = 28
    cache.cache_prefix(record, int32_bytes(PROMPT), 28, 0)
    second = slot_of(cache, record)
    assert first != second
    assert states_of(cache).component.protected == 1, "the step in flight writes it, the next one reads it"
    assert cache.extend_row(record, 30)
    assert copied(cache, record, 1) == [(first, second)]
    cache.launched(1)
    cache.settle(0)
    assert states_of(cache).component.protected == 1
    cache.settle(1)
    assert states_of(cache).component.protected == 0
    cache.lengths.kv_committed[record.row] = 30
    finish(cache, record, PROMPT)


def test_a_state_that_saves_little_is_not_worth_a_slot() -> None:
    cache = cache_of()
    states_of(cache).least_gain = 16
    run(cache, PROMPT[:19])
    assert states_of(cache).pool.num_free == 7, "16 tokens are"
    run(cache, PROMPT[:31])
    assert cached(cache, PROMPT) == 16
    assert cache.tree.num_nodes == 1, "keys behind the last state serve nobody"
    assert states_of(cache).pool.num_free == 7


def test_eviction_takes_states_and_a_leaf_without_one_is_evicted_with_its_keys() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    run(cache, [*PROMPT[:14], 99, 98, 97])
    run(cache, [*PROMPT[:14], 99, 98, 96, 95, 94, 93])
    full, states = cache.groups[0], states_of(cache)
    assert cached(cache, PROMPT) == 28
    assert cache.tree.num_nodes == 4
    cache.tree.claim(cache.probe(int32_bytes(PROMPT), 29, None))
    assert cache.tree.evict(states.component, 1) == 1
    check_everything(cache)
    assert cached(cache, PROMPT) == 28, "used lately"
    assert full.pool.num_free + full.component.evictable == 60
    while cache.tree.evict(states.component, 1):
        check_everything(cache)
    assert cache.tree.num_nodes == 0
    assert full.pool.num_free == 60, "no key is left that no state serves"


def test_the_end_of_a_prompt_takes_no_slot_from_states_that_were_hit() -> None:
    cache = cache_of(slots=3, rows=2, track=0)
    run(cache, PROMPT[:17])
    for tail in (80, 81, 82):
        record = open_row(cache, [*PROMPT[:17], tail])
        compute(cache, record, [*PROMPT[:17], tail])
        finish(cache, record, [*PROMPT[:17], tail])
    for first in (50, 60, 70):
        run(cache, [first] * 9)
        assert cached(cache, PROMPT) == 16
    assert cached(cache, [70] * 9) == 8, "there is one for these in turn"
    assert cached(cache, [60] * 9) == 0


def test_a_hit_state_is_evicted_late_until_the_request_has_left_another() -> None:
    cache = cache_of()
    states = states_of(cache).component
    run(cache, PROMPT)
    node = cache.probe(int32_bytes(PROMPT), len(PROMPT), None).node
    snapshot = states.snapshot(node)
    assert snapshot is not None
    snapshot.hits = 1
    run(cache, [40, *PROMPT])
    assert states.candidate() is not node
    states.pass_by(node)
    assert states.candidate() is node, "it has the place of any other, and was used before the other"
    snapshot.shared = True
    states.touch(node)
    assert states.candidate() is not node, "somebody began there after that"


def test_a_node_between_others_keeps_its_keys_without_a_state() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    run(cache, [*PROMPT[:14], 99, 98, 97, 96, 95, 94])
    states = states_of(cache)
    (upper,) = [node for node in cache.tree.nodes() if len(node.children) == 2]
    states.component.order.discard(upper)
    states.component.order.add(upper)
    assert states.component.evict_at(upper, 1) == 3
    states.component.give_back()
    check_everything(cache)
    assert cached(cache, PROMPT[:20]) == 0
    assert cached(cache, PROMPT) == 28


def test_evicted_keys_take_their_state_with_them() -> None:
    """A leaf that loses a page no longer has the length of its state."""
    cache = cache_of()
    run(cache, PROMPT)
    assert cache.tree.evict(cache.groups[0].component, 1) == 7, "what is left would serve nobody"
    check_everything(cache)
    assert states_of(cache).pool.num_free == 8
    assert cache.tree.num_nodes == 0


def test_decoding_keeps_the_state_of_the_last_boundary_in_a_second_slot() -> None:
    cache = cache_of()
    tokens = [*PROMPT, *range(40, 60)]
    record = open_row(cache, PROMPT)
    step = compute(cache, record, PROMPT)
    slots = set()
    for _ in range(9):
        step = decode(cache, record, 1, step)
        slots.add(slot_of(cache, record))
    assert len(slots) == 2, "two slots in turn"
    finish(cache, record, tokens[:39])
    assert cached(cache, tokens) == 36
    assert states_of(cache).pool.num_free == 8 - 2


def test_a_row_that_ends_on_a_boundary_inserts_its_own_slot() -> None:
    cache = cache_of(track=0)
    tokens = [*PROMPT, *range(40, 60)]
    record = open_row(cache, PROMPT)
    decode(cache, record, 2, compute(cache, record, PROMPT))
    finish(cache, record, tokens[:32])
    assert cached(cache, tokens) == 32


def test_the_state_after_an_extra_step_is_not_kept() -> None:
    """An overlapped finish has one more step in flight, whose token is dropped."""
    cache = cache_of(track=0)
    tokens = [*PROMPT, *range(40, 60)]
    record = open_row(cache, PROMPT)
    decode(cache, record, 3, compute(cache, record, PROMPT))
    cache.lengths.kv_committed[record.row] = 32
    finish(cache, record, tokens[:32])
    assert cached(cache, tokens) == 28


def test_without_second_slots_an_output_that_ends_between_boundaries_keeps_only_the_prompts_state() -> None:
    cache = cache_of(track=0)
    tokens = [*PROMPT, *range(40, 60)]
    record = open_row(cache, PROMPT)
    decode(cache, record, 9, compute(cache, record, PROMPT))
    assert len(states_of(cache).owned(record, 0)) == 1
    finish(cache, record, tokens[:39])
    assert cached(cache, tokens) == 28
    assert cache.tree.num_nodes == 1


def test_second_slots_are_taken_back_for_rows() -> None:
    cache = cache_of(slots=3, rows=3)
    record = open_row(cache, PROMPT)
    decode(cache, record, 6, compute(cache, record, PROMPT))
    assert len(states_of(cache).owned(record, 0)) == 2
    others = [open_row(cache, [70 + k] * 9) for k in range(2)]
    assert len(states_of(cache).owned(record, 0)) == 1
    assert states_of(cache).available == 0
    for each in (record, *others):
        finish(cache, each, PROMPT, insert=False)
    assert states_of(cache).pool.num_free == 3


def test_rows_take_no_second_slot_while_others_need_it() -> None:
    cache = cache_of(slots=3, rows=3)
    record = open_row(cache, PROMPT[:3])
    rows = np.array([record.row], np.int32)
    step = compute(cache, record, PROMPT[:3])
    other = open_row(cache, [70, 71])
    for number in range(step, step + 6):
        assert cache.extend_decode(rows, prompts_wait=True) is not None
        cache.launched(number)
        cache.settle(number)
    assert states_of(cache).available == 1
    for each in (record, other):
        finish(cache, each, PROMPT, insert=False)


def test_with_reuse_off_a_row_has_one_slot_and_nothing_is_kept() -> None:
    cache = cache_of(reuse=False)
    record = open_row(cache, PROMPT)
    assert cache.chunk_end(record, 0, 30, 30) == 30, "no chunk ends early for nothing"
    decode(cache, record, 9, compute(cache, record, PROMPT))
    assert states_of(cache).pool.num_free == 7
    finish(cache, record, [*PROMPT, *range(40, 50)])
    assert states_of(cache).pool.num_free == 8
    assert cache.tree.num_nodes == 0


def test_no_row_without_a_slot() -> None:
    """Free pages for keys do not imply free slots for states."""
    cache = cache_of(slots=2, rows=3)
    records = [open_row(cache, [70 + k] * 9) for k in range(2)]
    probe = cache.probe(int32_bytes([90] * 9), 8, None)
    assert states_of(cache).prompt_need(9, 0) > states_of(cache).available_beside(probe)
    for each in records:
        finish(cache, each, PROMPT, insert=False)


def test_a_model_with_only_states_needs_no_pages() -> None:
    cache = KVCache((PoolSpec("mamba", CacheKind.STATE, 5, PAGE),), 4, 200, state_interval=PAGE, debug=True)
    states_of(cache).least_gain = 1
    run(cache, PROMPT)
    assert cached(cache, PROMPT) == 28
    assert cache.first_growing is None


def test_a_second_unpin_and_a_second_owner_are_errors() -> None:
    cache = cache_of()
    run(cache, PROMPT)
    states = states_of(cache)
    (node,) = cache.tree.nodes()
    with pytest.raises(RuntimeError, match="unpinned more often than pinned"):
        states.component.unpin_snapshot(node)
    record = open_row(cache, PROMPT)
    states.table.pages[record.row, 0] = states.component.pages(node)[0]
    with pytest.raises(InvariantError, match="two owners"):
        check_everything(cache)
    with pytest.raises(OwnershipError):
        finish(cache, record, PROMPT, insert=False)


def test_two_pools_of_states_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="share the slots of one pool"):
        KVCache(tuple(PoolSpec("mamba", CacheKind.STATE, 9, PAGE) for _ in range(2)), 4, 200)


def test_evicting_a_state_for_a_row_joins_no_nodes_of_the_row_itself() -> None:
    """Another row has cached the same tokens meanwhile, and the row's next slot comes from evicting a state on its own
    path. The window group comes after the states, so it would learn of the row's new prefix last."""
    pools = (PoolSpec("mamba", CacheKind.STATE, 5 + 1, PAGE), PoolSpec("swa", CacheKind.WINDOW, 60 + 1, PAGE, 5))
    cache = KVCache(pools, 6, 200, state_interval=0, debug=True)
    states_of(cache).least_gain = 1
    run(cache, PROMPT[:9])
    late = open_row(cache, PROMPT)
    run(cache, PROMPT[:17])
    copied(cache, late, 9)
    cache.launched(9)
    cache.settle(9)
    others = [open_row(cache, [50 + number] * 9) for number in range(states_of(cache).pool.num_free)]
    assert cache.extend_row(late, 24)
    cache.lengths.kv_committed[late.row] = 24
    cache.cache_prefix(late, int32_bytes(PROMPT), 24, 10)
    check_everything(cache)
    assert cached(cache, PROMPT) == 24
    for record in (late, *others):
        finish(cache, record, PROMPT, insert=False)


def finished(cache: KVCache, tokens: list[int], step: int) -> int:
    """The next step's number after a request that computes its prompt and ends unproven."""
    record = open_row(cache, tokens)
    step = compute(cache, record, tokens, step)
    cache.settle(step)
    cache.release_kv_cache(record, int32_bytes(tokens), insert=True)
    return step


def test_unproven_states_before_the_one_that_a_failed_request_read_are_dropped_too() -> None:
    """Its own may come from them. Dropped one at a time, they made a request fail that only read them."""
    cache, step = cache_of(), 0
    for end in (8, 16):  # branches, so that the prompt is several nodes
        step = finished(cache, [*PROMPT[:end], 91, 92, 93, 94, 95], step)
    record = open_row(cache, PROMPT)
    step = compute(cache, record, PROMPT, step)
    assert cache.trust.prove(record, step)
    cache.tree.evict(states_of(cache).component, 99)
    for end in (9, 17):
        step = finished(cache, PROMPT[:end], step)
    reader = open_row(cache, PROMPT[:25])
    assert (reader.matched, reader.on_trust) == (16, True)
    cache.trust.distrust(reader)
    assert cache.probe(int32_bytes(PROMPT), len(PROMPT) - 1, None).length == 0
    for each in (reader, record):
        cache.release_kv_cache(each, b"", insert=False)
    check_everything(cache)
