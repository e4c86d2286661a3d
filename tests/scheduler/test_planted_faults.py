"""Faults that other engines shipped, planted one by one: the simulator or the ledger must fail each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.simulation import simulate

from sglang_jax.mem_cache.invariants import InvariantError
from sglang_jax.mem_cache.kv_cache import KVCache, RowKV
from sglang_jax.mem_cache.ledger import OwnershipError
from sglang_jax.mem_cache.radix_tree import RadixTree
from sglang_jax.runner.plan import PageDeltas
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.scheduler import Scheduler

SCHEDULES = 2000


def skip_unlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "unlock", lambda self, node: None)


def free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    release = KVCache.release_kv_cache

    def release_twice(self: KVCache, record: RowKV, tokens: bytes, *, insert: bool) -> None:
        first = record.cache_protected_len // self.page_size
        pages = self.table.run(record.row, first, self.pages_for(record.kv_allocated_len))
        release(self, record, tokens, insert=insert)
        self.pool.free(pages, (record.row << 3) | 2)

    monkeypatch.setattr(KVCache, "release_kv_cache", release_twice)


def protect_a_page_less(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_prefix = KVCache.cache_prefix

    def cache_and_forget(self: KVCache, record: RowKV, tokens: bytes, step: int | None) -> None:
        before = record.cache_protected_len
        cache_prefix(self, record, tokens, step)
        if record.cache_protected_len > before:
            self.lengths.cache_protected[record.row] -= self.page_size

    monkeypatch.setattr(KVCache, "cache_prefix", cache_and_forget)


def protect_a_page_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matched length is taken for the protected one: the unaligned tail's page is nobody's."""
    release = KVCache.release_kv_cache

    def release_less(self: KVCache, record: RowKV, tokens: bytes, *, insert: bool) -> None:
        ceiling = self.pages_for(record.kv_committed_len) * self.page_size
        if not insert:
            self.lengths.cache_protected[record.row] = ceiling
        release(self, record, tokens, insert=insert)

    monkeypatch.setattr(KVCache, "release_kv_cache", release_less)


def release_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished request's row and pages go back while the step in flight still has them."""
    end = Scheduler._end

    def end_at_once(self: Scheduler, request: Request, *arguments: object, **options: object) -> None:
        if request.kv is not None:
            self.table.last_step[request.row] = self._finished_step
        end(self, request, *arguments, **options)

    monkeypatch.setattr(Scheduler, "_end", end_at_once)


def free_duplicates_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own copy of a shared prefix is freed though the step in flight reads it."""
    retire = KVCache._retire
    monkeypatch.setattr(KVCache, "_retire", lambda self, pages, owner, step: retire(self, pages, owner, None))
    monkeypatch.setattr("sglang_jax.scheduler.admission.Admission._should_wait", lambda self, request: False)


def lose_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    take = KVCache.take_deltas

    def take_all_but_the_last(self: KVCache) -> PageDeltas:
        deltas = take(self)
        return PageDeltas(deltas.rows[:-1], deltas.columns[:-1], deltas.pages[:-1])

    monkeypatch.setattr(KVCache, "take_deltas", take_all_but_the_last)


def commit_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last drawn token counts as committed, though its KV was never written."""
    publish = Publisher.tokens

    def publish_and_commit(self: Publisher, rows: np.ndarray, tokens: np.ndarray) -> None:
        publish(self, rows, tokens)
        for row in rows.tolist():
            record = self._table.at(row).record
            record.lengths.kv_committed[row] = self._table.num_tokens[row]

    monkeypatch.setattr(Publisher, "tokens", publish_and_commit)


FAULTS = [
    skip_unlock,
    free_twice,
    protect_a_page_less,
    protect_a_page_more,
    release_while_in_flight,
    free_duplicates_while_in_flight,
    lose_a_delta,
    commit_the_last_token,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((OwnershipError, InvariantError, AssertionError, RuntimeError, IndexError)):
        simulate(SCHEDULES, known_fault=True)
