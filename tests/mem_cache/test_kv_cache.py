"""A row's KV from admission to release, worked by hand with pages of four tokens."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.caches import compute, int32_bytes, lengths, small_cache

from sglang_jax.mem_cache.invariants import check_everything, page_balance
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.ledger import RETIRED
from sglang_jax.mem_cache.row_kv import RowKV

PROMPT = list(range(1, 31))


def open_row(cache: KVCache, tokens: list[int], limit: int | None = None, namespace: str | None = None) -> RowKV:
    return cache.open_row(cache.probe(int32_bytes(tokens), len(tokens) - 1 if limit is None else limit, namespace))


def seed_tree(cache: KVCache, tokens: list[int]) -> list[int]:
    """Leaves whole pages of tokens in the tree, as a finished request does; returns their page ids."""
    record = open_row(cache, tokens)
    compute(cache, record, tokens)
    cache.release_kv_cache(record, int32_bytes(tokens), insert=True)
    node = cache.tree.claim(cache.tree.probe(int32_bytes(tokens), None))
    return cache.groups[0].component.collect(node, len(tokens) // cache.page_size).tolist()


class TestLifeCycle:
    def test_protected_committed_and_allocated_by_hand(self) -> None:
        """Prompt of 10, chunks of 6 and 4, then two decode steps, of which one is still in flight at the end."""
        cache = small_cache()
        record = open_row(cache, PROMPT[:10])
        assert lengths(record) == (0, 0, 0)
        compute(cache, record, PROMPT[:6])
        assert lengths(record) == (4, 6, 6)
        compute(cache, record, PROMPT[:10])
        assert lengths(record) == (8, 10, 10)
        assert page_balance(cache, cache.groups[0]).request_owned == 1
        rows = np.array([record.row], np.int32)
        for allocated in (11, 12, 13):
            kv_lens = cache.extend_decode(rows)
            assert kv_lens is not None
            assert kv_lens.tolist() == [allocated]
        cache.lengths.kv_committed[record.row] = 11
        assert lengths(record) == (8, 11, 13)
        assert page_balance(cache, cache.groups[0]).request_owned == 2
        check_everything(cache)
        cache.release_kv_cache(record, int32_bytes(PROMPT[:11]), insert=True)
        assert cache.peek(int32_bytes(PROMPT), 30, None) == 8
        assert page_balance(cache, cache.groups[0]) == type(page_balance(cache, cache.groups[0]))(30, 2, 0, 0, 0, 0, 32)
        check_everything(cache)

    def test_the_unaligned_tail_belongs_to_the_request(self) -> None:
        """Regression: taking the length held by the row for the length owned by the tree leaked the tail's page."""
        cache = small_cache()
        record = open_row(cache, PROMPT[:10])
        compute(cache, record, PROMPT[:6])
        tail = cache.groups[0].table.run(record.row, 1, 2)
        compute(cache, record, PROMPT[:7])
        assert cache.groups[0].table.run(record.row, 1, 2).tolist() == tail.tolist(), (
            "the chunks share a row and a tail"
        )
        assert page_balance(cache, cache.groups[0]).request_owned == 1
        cache.release_kv_cache(record, b"", insert=False)
        assert page_balance(cache, cache.groups[0]).free == 31
        assert page_balance(cache, cache.groups[0]).evictable == 1

    def test_at_finish_the_last_tokens_kv_is_not_committed(self) -> None:
        """The last sampled token was never run: a page that includes it would be cached with a hole."""
        cache = small_cache()
        record = open_row(cache, PROMPT[:4])
        compute(cache, record, PROMPT[:4])
        rows = np.array([record.row], np.int32)
        for _ in range(4):
            cache.extend_decode(rows)
        cache.lengths.kv_committed[record.row] = 7
        cache.release_kv_cache(record, int32_bytes(PROMPT[:8]), insert=True)
        assert cache.peek(int32_bytes(PROMPT), 30, None) == 4
        check_everything(cache)

    def test_over_allocation_of_the_step_in_flight_is_freed_once(self) -> None:
        """A request that ends has one step too many in flight, perhaps with its own page."""
        cache = small_cache(pages=3)
        record = open_row(cache, PROMPT[:8])
        compute(cache, record, PROMPT[:8])
        cache.extend_decode(np.array([record.row], np.int32))
        assert cache.groups[0].pool.num_free == 0
        cache.release_kv_cache(record, int32_bytes(PROMPT[:8]), insert=True)
        assert (cache.groups[0].pool.num_free, cache.groups[0].component.evictable) == (1, 2)
        check_everything(cache)

    def test_release_without_insert_keeps_only_pages_of_the_tree(self) -> None:
        """Retract and abort do not touch `[0, protected)`."""
        cache = small_cache()
        record = open_row(cache, PROMPT)
        compute(cache, record, PROMPT[:9])
        cache.extend_row(record, 20)
        cache.lengths.kv_committed[record.row] = 20
        cache.release_kv_cache(record, int32_bytes(PROMPT), insert=False)
        assert cache.peek(int32_bytes(PROMPT), 30, None) == 8
        assert cache.groups[0].pool.num_free == 30
        assert cache.num_free_rows == 4
        check_everything(cache)

    def test_release_goes_in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Insert (which moves the lock to the new node), free the request's own pages, unlock, free the row: at no time
        could an eviction take pages that the request depends on."""
        cache = small_cache()
        record = open_row(cache, PROMPT[:10])
        compute(cache, record, PROMPT[:10])
        cache.extend_row(record, 17)
        cache.lengths.kv_committed[record.row] = 13
        events: list[str] = []
        tail = cache.groups[0].table.run(record.row, 3, 5).tolist()
        free, tree, free_row = cache.groups[0].pool.free, cache.tree, cache._free_row
        unlock, insert = tree.unlock, tree.insert
        monkeypatch.setattr(
            cache.groups[0].pool, "free", lambda p, o: events.append(f"free {p.tolist()}") or free(p, o)
        )
        monkeypatch.setattr(tree, "unlock", lambda node: events.append("unlock") or unlock(node))
        monkeypatch.setattr(tree, "insert", lambda *a: events.append("insert") or insert(*a))
        monkeypatch.setattr(cache, "_free_row", lambda *a: events.append("row") or free_row(*a))
        cache.release_kv_cache(record, int32_bytes(PROMPT[:13]), insert=True)
        assert events == ["insert", f"free {tail}", "unlock", "row"]
        check_everything(cache)

    def test_a_released_row_starts_clean_for_the_next(self) -> None:
        cache = small_cache(rows=1)
        record = open_row(cache, PROMPT)
        compute(cache, record, PROMPT)
        cache.release_kv_cache(record, b"", insert=False)
        again = open_row(cache, PROMPT, namespace="other")
        assert again.row == record.row
        assert lengths(again) == (0, 0, 0)
        assert not cache.groups[0].table.pages.any()

    def test_no_page_is_left_at_idle(self) -> None:
        """ "A few tokens within tolerance" is a leak."""
        cache = small_cache()
        for first in range(5):
            record = open_row(cache, PROMPT[first:])
            compute(cache, record, PROMPT[first : first + 9])
            cache.release_kv_cache(record, int32_bytes(PROMPT[first:]), insert=first % 2 == 0)
        cache.flush()
        assert cache.groups[0].pool.num_free == cache.groups[0].pool.total == 32
        assert cache.tree.num_nodes == 0


class TestMatch:
    @pytest.mark.parametrize(
        ("prompt_len", "matched"),
        [(13, 12), (12, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0)],
    )
    def test_a_match_leaves_one_token_to_run_and_has_whole_pages(self, prompt_len: int, matched: int) -> None:
        """A fully cached prompt has no logits, and a query of length zero hangs a kernel."""
        cache = small_cache()
        seed_tree(cache, PROMPT[:16])
        record = open_row(cache, PROMPT[:prompt_len])
        assert lengths(record) == (matched,) * 3
        assert cache.peek(int32_bytes(PROMPT[:prompt_len]), prompt_len - 1, None) == matched

    @pytest.mark.parametrize(("limit", "matched"), [(0, 0), (3, 0), (4, 4), (11, 8), (-1, 0)])
    def test_a_match_stops_at_the_first_requested_prompt_logprob(self, limit: int, matched: int) -> None:
        cache = small_cache()
        seed_tree(cache, PROMPT[:16])
        assert lengths(open_row(cache, PROMPT, limit)) == (matched,) * 3

    def test_the_row_points_at_the_trees_pages_and_the_runner_gets_the_change(self) -> None:
        cache = small_cache()
        pages = seed_tree(cache, PROMPT[:12])
        cache.take_deltas()
        record = open_row(cache, PROMPT)
        assert cache.groups[0].table.run(record.row, 0, 4).tolist() == [*pages, 0]
        (deltas,) = cache.take_deltas()
        assert deltas.columns.tolist() == [0, 1, 2]
        assert deltas.pages.tolist() == pages

    def test_a_matched_prefix_is_locked_until_release(self) -> None:
        cache = small_cache(pages=4)
        seed_tree(cache, PROMPT[:12])
        record = open_row(cache, PROMPT[:12])
        assert (cache.groups[0].component.protected, cache.groups[0].component.evictable, cache.available_pages) == (
            2,
            1,
            2,
        )
        cache.flush()
        assert cache.peek(int32_bytes(PROMPT), 30, None) == 8
        cache.release_kv_cache(record, b"", insert=False)
        assert cache.available_pages == 4

    def test_a_refused_admission_releases_everything(self) -> None:
        """Regression: the lock of a request that was matched and then not admitted kept its prefix forever."""
        cache = small_cache()
        seed_tree(cache, PROMPT[:12])
        cache.take_deltas()
        before = page_balance(cache, cache.groups[0])
        for _ in range(3):
            record = open_row(cache, PROMPT)
            cache.release_kv_cache(record, b"", insert=False)
        assert page_balance(cache, cache.groups[0]) == before
        assert cache.num_free_rows == 4
        assert len(cache.take_deltas()[0].pages) == 0
        check_everything(cache)


class TestGrowth:
    def test_a_row_takes_a_page_only_where_it_crosses_into_one(self) -> None:
        cache = small_cache()
        record = open_row(cache, PROMPT)
        taken = []
        for length in (1, 4, 5, 8, 20):
            assert cache.extend_row(record, length)
            taken.append(32 - cache.groups[0].pool.num_free)
        assert taken == [1, 1, 2, 2, 5]

    def test_a_row_that_cannot_grow_takes_nothing(self) -> None:
        """All or nothing, and nothing is evicted for it either."""
        cache = small_cache(pages=4)
        seed_tree(cache, PROMPT[:4])
        record = open_row(cache, PROMPT, namespace="other")
        assert not cache.extend_row(record, 17)
        assert lengths(record) == (0, 0, 0)
        assert (cache.groups[0].pool.num_free, cache.groups[0].component.evictable) == (3, 1)
        assert cache.extend_row(record, 16)
        assert cache.num_evicted == 1

    def test_a_decode_batch_takes_pages_for_all_or_none(self) -> None:
        cache = small_cache(pages=4)
        records = [open_row(cache, PROMPT, namespace=str(k)) for k in range(3)]
        for record in records:
            cache.extend_row(record, 4)
        rows = np.array([record.row for record in records], np.int32)
        assert cache.extend_decode(rows) is None
        assert [record.kv_allocated_len for record in records] == [4, 4, 4]
        assert cache.groups[0].pool.num_free == 1
        kv_lens = cache.extend_decode(rows[:1])
        assert kv_lens is not None
        assert kv_lens.tolist() == [5]
        kv_lens = cache.extend_decode(rows[:1])
        assert kv_lens is not None
        assert kv_lens.tolist() == [6]
        check_everything(cache)

    def test_pages_are_taken_from_the_cache_when_none_is_free(self) -> None:
        cache = small_cache(pages=4)
        seed_tree(cache, PROMPT[:16])
        assert (cache.groups[0].pool.num_free, cache.available_pages) == (0, 4)
        record = open_row(cache, PROMPT, namespace="other")
        assert cache.extend_row(record, 9)
        assert cache.num_evicted == 3
        assert cache.peek(int32_bytes(PROMPT), 30, None) == 4


class TestDuplicates:
    def two_rows_with_the_same_prompt(self, cache: KVCache) -> tuple[RowKV, RowKV]:
        first, second = open_row(cache, PROMPT[:10]), open_row(cache, PROMPT[:10])
        compute(cache, first, PROMPT[:10])
        return first, second

    def test_a_row_is_switched_to_the_trees_copy_and_its_own_is_freed_once(self) -> None:
        """Regression: both the request and the tree freed the duplicate, or neither did."""
        cache = small_cache()
        first, second = self.two_rows_with_the_same_prompt(cache)
        assert cache.extend_row(second, 10)
        own = cache.groups[0].table.run(second.row, 0, 3).tolist()
        cache.take_deltas()
        compute(cache, second, PROMPT[:10])
        theirs = cache.groups[0].table.run(first.row, 0, 2).tolist()
        assert cache.groups[0].table.run(second.row, 0, 3).tolist() == [*theirs, own[2]]
        (deltas,) = cache.take_deltas()
        assert (deltas.rows.tolist(), deltas.columns.tolist()) == ([second.row] * 2, [0, 1])
        assert deltas.pages.tolist() == theirs
        assert set(own[:2]) <= set(cache.groups[0].pool.free_pages().tolist())
        assert lengths(second) == (8, 10, 10)
        check_everything(cache)
        cache.release_kv_cache(first, b"", insert=False)
        assert cache.groups[0].component.protected == 2, "the second request holds a lock of its own"
        cache.release_kv_cache(second, b"", insert=False)
        check_everything(cache)
        assert page_balance(cache, cache.groups[0]).free == 30

    def test_duplicates_wait_for_the_step_in_flight(self) -> None:
        """A page freed while a launched step still writes it would belong to two requests."""
        cache = small_cache()
        _, second = self.two_rows_with_the_same_prompt(cache)
        assert cache.extend_row(second, 10)
        own = cache.groups[0].table.run(second.row, 0, 2)
        compute(cache, second, PROMPT[:10], step=7)
        assert cache.retired_pages == 2
        assert cache.groups[0].pool.ledger is not None
        assert (cache.groups[0].pool.ledger.owners[own] == RETIRED).all()
        check_everything(cache)
        cache.settle(6)
        assert cache.retired_pages == 2
        cache.settle(7)
        assert cache.retired_pages == 0
        assert set(own.tolist()) <= set(cache.groups[0].pool.free_pages().tolist())
        cache.settle(8)
        check_everything(cache)

    def test_a_partly_shared_chunk_frees_only_its_duplicates(self) -> None:
        cache = small_cache()
        first, second = open_row(cache, PROMPT), open_row(cache, PROMPT)
        compute(cache, first, PROMPT[:8])
        assert cache.extend_row(second, 16)
        own = cache.groups[0].table.run(second.row, 0, 4).tolist()
        compute(cache, second, PROMPT[:16])
        shared = cache.groups[0].table.run(first.row, 0, 2).tolist()
        assert cache.groups[0].table.run(second.row, 0, 4).tolist() == [*shared, *own[2:]]
        assert cache.groups[0].pool.num_free == 32 - 4
        check_everything(cache)

    def test_caching_the_same_length_twice_does_nothing(self) -> None:
        """Regression: a parked chunk that was cached twice freed its pages twice."""
        cache = small_cache()
        record = open_row(cache, PROMPT)
        compute(cache, record, PROMPT[:10])
        before, locked_node = page_balance(cache, cache.groups[0]), record.locked_node
        cache.cache_prefix(record, int32_bytes(PROMPT), 10, None)
        cache.cache_prefix(record, int32_bytes(PROMPT), 5, None)
        assert page_balance(cache, cache.groups[0]) == before
        assert record.locked_node is locked_node
        check_everything(cache)


class TestReuseOff:
    def test_nothing_matches_and_nothing_is_inserted(self) -> None:
        cache = small_cache(reuse=False)
        for _ in range(2):
            assert cache.peek(int32_bytes(PROMPT), 30, None) == 0
            record = open_row(cache, PROMPT)
            assert lengths(record) == (0, 0, 0)
            compute(cache, record, PROMPT)
            assert lengths(record) == (0, 30, 30)
            assert page_balance(cache, cache.groups[0]).request_owned == 8
            check_everything(cache)
            cache.release_kv_cache(record, int32_bytes(PROMPT), insert=True)
            assert cache.groups[0].pool.num_free == 32
        assert cache.tree.num_nodes == 0
