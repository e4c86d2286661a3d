"""Groups of layers with windows, with and without other groups: what rows hold, what the tree keeps, where
matches end."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.caches import compute, int32_bytes

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.group import WindowGroup
from sglang_jax.mem_cache.invariants import InvariantError, check_everything
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.window_kv import WindowKV
from sglang_jax.runner.plan import PoolSpec

PAGE = 4
PROMPT = list(range(1, 41))
"""Ten pages."""


def cache_of(window: int = 9, pages: int = 24, full: int | None = 40, rows: int = 4) -> KVCache:
    """A group with full attention (unless `full=None`), and one with a window of `window` tokens and `pages` pages."""
    pools = [] if full is None else [PoolSpec("full", CacheKind.FULL, full + 1, PAGE)]
    pools.append(PoolSpec("swa", CacheKind.WINDOW, pages + 1, PAGE, window))
    return KVCache(tuple(pools), rows, 200, step_tokens=16, debug=True)


def window_of(cache: KVCache) -> tuple[WindowGroup, WindowKV]:
    group = cache.groups[-1]
    assert isinstance(group, WindowGroup)
    return group, group.component


def open_row(cache: KVCache, tokens: list[int]) -> RowKV:
    return cache.open_row(cache.probe(int32_bytes(tokens), len(tokens) - 1, None))


def decode(cache: KVCache, record: RowKV, count: int, first_step: int = 0) -> None:
    """Steps of one token each, with one in flight while the next is planned."""
    rows = np.array([record.row], np.int32)
    for step in range(first_step, first_step + count):
        lengths = cache.extend_decode(rows)
        assert lengths is not None
        cache.launched(step)
        cache.settle(step - 1)
        cache.lengths.kv_committed[record.row] = lengths[0]
        check_everything(cache)
    cache.settle(first_step + count - 1)


def finish(cache: KVCache, tokens: list[int], insert: bool = True) -> None:
    """A request that computes its prompt and ends."""
    record = open_row(cache, tokens)
    compute(cache, record, tokens)
    cache.release_kv_cache(record, int32_bytes(tokens), insert=insert)
    check_everything(cache)


def cached(cache: KVCache, tokens: list[int]) -> int:
    return cache.peek(int32_bytes(tokens), len(tokens), None)


@pytest.mark.parametrize("full", [60, None])
def test_an_endless_output_only_keeps_its_window(full: int | None) -> None:
    cache = cache_of(window=9, pages=6, full=full)
    group, _ = window_of(cache)
    record = open_row(cache, PROMPT[:3])
    compute(cache, record, PROMPT[:3])
    decode(cache, record, 150)
    held = cache.pages_for(record.kv_allocated_len) - group.held_from(record.row)
    assert held <= group.reach + 2
    assert group.pool.num_free >= 6 - (group.reach + 2)
    if full is not None:
        assert cache.groups[0].pool.num_free == full - cache.pages_for(153)


def test_no_page_is_freed_while_the_step_in_flight_reads_it() -> None:
    """The query at position 16 sees tokens from 8 on; that of the step in flight, at 15, also sees token 7."""
    cache = cache_of(window=9)
    group, _ = window_of(cache)
    record = open_row(cache, PROMPT[:15])
    cache.extend_row(record, 15)
    cache.lengths.kv_committed[record.row] = 15
    rows = np.array([record.row], np.int32)
    cache.extend_decode(rows)
    cache.launched(0)
    cache.let_go(rows)
    assert group.held_from(record.row) == 1, "while its step is in flight, the query at 15 sees page 1"
    cache.settle(0)
    cache.lengths.kv_committed[record.row] = 16
    cache.let_go(rows)
    assert group.held_from(record.row) == 2


def test_growth_is_granted_by_all_groups_or_by_none() -> None:
    cache = cache_of(window=40, pages=3, full=40)
    record = open_row(cache, PROMPT)
    assert cache.extend_row(record, 12)
    free = [group.pool.num_free for group in cache.groups]
    assert not cache.extend_row(record, 13)
    assert [group.pool.num_free for group in cache.groups] == free
    assert record.kv_allocated_len == 12
    check_everything(cache)


def test_a_match_ends_where_the_window_before_it_is_complete() -> None:
    """Two pages of a window of nine tokens hold the eight before a prefix's end; pages of full attention stay, and are
    useless where the window's are gone."""
    cache = cache_of(window=9)
    _, component = window_of(cache)
    finish(cache, PROMPT)
    assert cached(cache, PROMPT) == 40
    cache.tree.evict(component, 5)
    assert cache.groups[0].component.evictable == 10, "full pages stay"
    assert cached(cache, PROMPT) == 40
    assert cached(cache, PROMPT[:32]) == 32, "the pages before token 32 are there"
    assert cached(cache, PROMPT[:28]) == 28
    assert cached(cache, PROMPT[:27]) == 0, "of the two before token 24 one is gone"
    check_everything(cache)
    cache.tree.evict(component, 4)
    assert cached(cache, PROMPT) == 0
    assert cache.tree.num_nodes == 0, "what is left serves nobody"
    assert all(each.pool.num_free == each.pool.total for each in cache.groups)


def test_a_leaf_without_its_earlier_windows_is_evicted_as_a_whole() -> None:
    """One page of full attention is needed. Where all window pages are there, one page of each group is evicted; where
    those before the last window are gone, no match can end in the rest."""
    whole, behind = cache_of(window=9), cache_of(window=9)
    finish(whole, PROMPT)
    finish(behind, PROMPT)
    behind.tree.evict(window_of(behind)[1], 8)
    for cache, pages in ((whole, 1), (behind, 10)):
        full = cache.groups[0].component
        assert cache.tree.evict(full, 1) == pages
        assert [group.pool.total - group.pool.num_free for group in cache.groups] == [10 - pages] * 2
        assert cached(cache, PROMPT) == 4 * (10 - pages)
        check_everything(cache)


def test_a_leaf_below_a_gap_is_evicted_like_others() -> None:
    """The gap above forbids a match in it: no request finds it, but it is the next to be evicted, and leaves nothing
    behind. Where it is as valid as its parent, which has lost all its window pages, the two become one node, which is
    evicted as a whole."""
    for parent_is_proven, expected in ((True, [1, 1, 1, 7]), (False, [10])):
        cache = cache_of(window=21)
        _, component = window_of(cache)
        finish(cache, PROMPT)
        finish(cache, [*PROMPT[:24], *range(100, 116)])
        if parent_is_proven:
            cache.tree.prove(cache.probe(int32_bytes(PROMPT[:24]), 24, None).node)
        assert cache.tree.evict(component, 10) == 10, "the first leaf, and all that its parent has"
        assert cached(cache, [*PROMPT[:24], *range(100, 116)]) == 0
        full, freed = cache.groups[0].component, []
        while full.evictable:
            freed.append(cache.tree.evict(full, 1))
            check_everything(cache)
        assert freed == expected, "the parent goes with the last page: no match can end there either"
        assert all(group.pool.num_free == group.pool.total for group in cache.groups)


def test_a_leaf_that_loses_its_window_is_evicted() -> None:
    """With its pages of all other groups: no match can end in it."""
    cache = cache_of(window=9)
    _, component = window_of(cache)
    finish(cache, PROMPT)
    finish(cache, [*PROMPT[:20], *range(100, 120)])
    while component.evictable:
        cache.tree.evict(component, 1)
        check_everything(cache)
    assert cache.tree.num_nodes == 0
    assert all(group.pool.num_free == group.pool.total for group in cache.groups)


def test_a_lost_window_is_refilled_and_pages_of_others_stay() -> None:
    """A running request depends on the keys of full attention; another that computes the same prefix again, since its
    window is gone, gives the tree only the missing pages."""
    cache = cache_of(window=9)
    _, component = window_of(cache)
    runs = open_row(cache, PROMPT)
    compute(cache, runs, PROMPT)
    cache.cache_prefix(runs, int32_bytes(PROMPT), 40, None)
    decode(cache, runs, 4)
    cache.tree.evict(component, component.evictable)
    assert cached(cache, PROMPT[:20]) == 0, "the head of the window is gone"
    full = cache.groups[0]
    before, free = full.table.run(runs.row, 0, 10).copy(), full.pool.num_free
    finish(cache, PROMPT[:20])
    assert cached(cache, PROMPT[:20]) == 20
    assert np.array_equal(full.table.run(runs.row, 0, 10), before)
    assert full.pool.num_free == free, "the copies of who came later are free again"
    cache.release_kv_cache(runs, int32_bytes([*PROMPT, *range(200, 204)]), insert=True)
    check_everything(cache)


def test_pages_that_a_row_freed_are_not_inserted() -> None:
    """An output of many windows leaves only its last one behind: no match ends before that."""
    cache = cache_of(window=9)
    group, component = window_of(cache)
    record = open_row(cache, PROMPT[:8])
    compute(cache, record, PROMPT[:8])
    decode(cache, record, 60)
    given_up = group.held_from(record.row)
    assert given_up > 10
    tokens = [*PROMPT[:8], *range(100, 160)]
    cache.release_kv_cache(record, int32_bytes(tokens), insert=True)
    check_everything(cache)
    prompts = 2
    assert sum(len(component.pages(node)) for node in cache.tree.nodes()) == prompts + 17 - given_up
    assert cached(cache, [*tokens, 1]) == 68
    assert cached(cache, tokens[: 4 * given_up]) == 4 * prompts


def test_a_recomputed_window_goes_to_the_node_that_lost_it() -> None:
    cache = cache_of(window=9)
    group, component = window_of(cache)
    finish(cache, PROMPT)
    finish(cache, [*PROMPT[:20], *range(100, 120)])
    cache.tree.evict(component, 9)
    assert cached(cache, PROMPT[:20]) < 20
    free = group.pool.num_free
    finish(cache, PROMPT[:20])
    assert cached(cache, PROMPT[:20]) == 20
    assert group.pool.num_free == free - 4, "the tree has the request's own pages now, each once"
    assert cache.groups[0].pool.num_free == 40 - 10, "of the others its copies were freed"
    check_everything(cache)


def test_a_row_depends_on_fewer_pages_as_it_advances() -> None:
    cache = cache_of(window=9)
    _, component = window_of(cache)
    finish(cache, PROMPT[:24])
    record = open_row(cache, PROMPT[:25])
    assert (record.cache_protected_len, component.protected) == (24, 2)
    compute(cache, record, PROMPT[:25])
    decode(cache, record, 8)
    assert component.protected == 1
    decode(cache, record, 4, 8)
    assert component.protected == 0
    assert cache.groups[0].component.protected == 6, "the others are locked to the end"
    cache.release_kv_cache(record, b"", insert=False)
    check_everything(cache)


def test_a_leaf_that_lost_its_window_while_locked_is_evicted_with_the_unlock() -> None:
    cache = cache_of(window=9)
    _, component = window_of(cache)
    finish(cache, PROMPT[:24])
    record = open_row(cache, PROMPT[:25])
    compute(cache, record, PROMPT[:25])
    decode(cache, record, 12)
    cache.tree.evict(component, 99)
    assert cache.tree.num_nodes > 0
    check_everything(cache)
    cache.release_kv_cache(record, b"", insert=False)
    assert cache.tree.num_nodes == 0
    assert all(each.pool.num_free == each.pool.total for each in cache.groups)


def test_a_sample_validates_only_the_window_pages_that_it_read() -> None:
    """A later request that starts further back reads pages that no sample has seen. If it fails, they are dropped."""
    cache = cache_of(window=9)
    record = open_row(cache, PROMPT)
    compute(cache, record, PROMPT)
    assert cache.trust.prove(record, 0)
    cache.release_kv_cache(record, int32_bytes(PROMPT), insert=True)
    other = open_row(cache, [*PROMPT[:20], 77, 78, 79, 80, 81])
    assert other.cache_protected_len == 20
    cache.trust.distrust(other)
    assert cached(cache, PROMPT) == 0, "the pages before token 20 are in doubt"
    cache.release_kv_cache(other, b"", insert=False)
    check_everything(cache)


def test_unproven_pages_before_those_that_a_failed_request_read_are_dropped_too() -> None:
    """Its own may come from them. Dropped one window at a time, they made a request fail that only read them."""
    cache = cache_of(window=9)
    for end in (12, 24):  # branches, so that the prompt is several nodes
        finish(cache, [*PROMPT[:end], 91, 92, 93, 94])
    record = open_row(cache, PROMPT)
    compute(cache, record, PROMPT)
    assert cache.trust.prove(record, 0)
    cache.release_kv_cache(record, int32_bytes(PROMPT), insert=True)
    other = open_row(cache, [*PROMPT[:24], 77, 78, 79, 80, 81])
    assert other.cache_protected_len == 24
    cache.trust.distrust(other)
    assert cached(cache, PROMPT) == 0
    cache.release_kv_cache(other, b"", insert=False)
    check_everything(cache)


def test_a_request_on_unvalidated_kv_counts_as_reader_until_it_samples() -> None:
    cache = cache_of(window=9)
    finish(cache, PROMPT)
    record = open_row(cache, [*PROMPT[:20], 77, 78])
    assert cache.trust.read_bad_kv(record)
    compute(cache, record, [*PROMPT[:20], 77, 78])
    assert cache.trust.prove(record, 0)
    assert not cache.trust.read_bad_kv(record), "what goes wrong from here on is its own"


def test_validated_pages_stay_when_a_later_request_fails_behind_them() -> None:
    cache = cache_of(window=9)
    record = open_row(cache, PROMPT)
    compute(cache, record, PROMPT)
    assert cache.trust.prove(record, 0)
    cache.release_kv_cache(record, int32_bytes(PROMPT), insert=True)
    tokens = [*PROMPT, 77, 78, 79, 80, 81]
    other = open_row(cache, tokens)
    compute(cache, other, tokens)
    cache.trust.distrust(other)
    assert cached(cache, tokens) == 40
    cache.release_kv_cache(other, b"", insert=False)
    check_everything(cache)


def test_pages_of_all_groups_hold_as_many_tokens() -> None:
    pools = (PoolSpec("full", CacheKind.FULL, 9, 4), PoolSpec("swa", CacheKind.WINDOW, 9, 8, 5))
    with pytest.raises(ValueError, match=r"same number of tokens, got \[4, 8\]"):
        KVCache(pools, 2, 32)


@pytest.mark.parametrize("tokens", [0, 3, 12])
def test_pages_hold_a_power_of_two(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"pages of {tokens} tokens; it must be a power of two"):
        PoolSpec("full", CacheKind.FULL, 9, tokens)


@pytest.mark.parametrize(
    ("kind", "window"), [(CacheKind.FULL, 5), (CacheKind.WINDOW, 0), (CacheKind.WINDOW, None), (CacheKind.STATE, 5)]
)
def test_a_pool_has_the_window_that_its_kind_has(kind: CacheKind, window: int | None) -> None:
    with pytest.raises(ValueError, match=f"kind {kind} has a window of {window}"):
        PoolSpec("one", kind, 9, 4, window)


def test_wrong_accounting_of_a_window_is_caught() -> None:
    def faulty() -> tuple[KVCache, WindowKV]:
        cache = cache_of(window=9)
        finish(cache, PROMPT[:24])
        open_row(cache, PROMPT[:25])
        return cache, window_of(cache)[1]

    cache, component = faulty()
    next(iter(cache.tree.nodes())).values[1].covers[2] = 2
    with pytest.raises(InvariantError, match="covered"):
        check_everything(cache)
    cache, component = faulty()
    component.evictable += 1
    component.pool.num_free -= 1
    with pytest.raises(InvariantError, match="miscounted"):
        check_everything(cache)
    cache, component = faulty()
    component.order.discard(next(iter(cache.tree.nodes())))
    with pytest.raises(InvariantError, match="loose pages, the order differs"):
        check_everything(cache)
    cache, component = faulty()
    next(iter(cache.tree.nodes())).values[1].proven = 9
    with pytest.raises(InvariantError, match="of 6 pages"):
        check_everything(cache)
