"""Rows that are divided among ranks: which rank gets a request, shortage on one of them, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import Bench
from helpers.simulated_sessions import SessionSimulation
from helpers.simulation import RANKS, RankSimulation, Simulation, simulate
from helpers.watch import Watch
from hypothesis import strategies as st

from sglang_jax.architectures import CacheKind
from sglang_jax.architectures.pooling import Pooling
from sglang_jax.mem_cache.data_parallel import DataParallelCache, PinsOfRanks
from sglang_jax.mem_cache.invariants import InvariantError
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.pins import Pin
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import PageDeltas, PoolSpec, RunnerSpec, StepPlan, check_plan
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.planner import Planner
from sglang_jax.scheduler.scheduler import Scheduler

PROMPT = [5, 9, 3, 8, 2, 7, 6, 4, 11, 12, 13, 14]


def ranks_of(bench: Bench) -> list[int]:
    cache = bench.scheduler.cache
    return sorted(cache.of_row(row).rank for row in cache.open_rows)


def test_schedules() -> None:
    met = simulate(30, kind=RankSimulation, sizes=RANKS)
    assert met["rows of several ranks in a step"] >= 60, met
    simulate(12, kind=SessionSimulation, sizes=RANKS)


def test_requests_that_share_nothing_go_to_all_ranks() -> None:
    bench = Bench(ranks=4, rows=2)
    for k in range(6):
        bench.add([k + 1, *PROMPT[: 2 + k]], 20)
    bench.scheduler.step()
    assert set(ranks_of(bench)) == {0, 1, 2, 3}
    bench.run()
    bench.check_outputs()


def test_a_request_goes_where_its_prefix_is() -> None:
    """Unless that rank has no room."""
    bench = Bench(ranks=3, rows=2)
    first = bench.add(PROMPT, 1)
    bench.run()
    kept = next(one.rank for one in bench.scheduler.cache.ranks if one.tree.num_nodes)
    for k in range(3):
        bench.add([*PROMPT[:8], 20 + k], 12)
    bench.scheduler.step()
    found = ranks_of(bench)
    assert found.count(kept) == 2
    assert len(found) == 3
    bench.run()
    bench.check_outputs()
    assert bench.channel.cached[first + 1] == bench.channel.cached[first + 2] == 8
    assert bench.channel.cached[first + 3] == 0


def test_shortage_on_one_rank_retracts_no_request_of_another() -> None:
    bench = Bench(ranks=2, rows=2, pages=8, page_size=4, options={"schedule_conservativeness": 0.01})
    watch = Watch(bench)
    endless = SamplingParams(max_new_tokens=24, ignore_eos=True, seed=5)
    for k in range(4):
        bench.add([3 + k, 1, 2, k], sampling=endless if k else replace(endless, max_new_tokens=2))
    retracted = set[int]()
    while not bench.scheduler.idle:
        watch.step()
        retracted |= {one.id for one in bench.scheduler.requests.values() if one.retractions}
    bench.check_outputs()
    assert len(retracted) == 1, "the newer of the two long outputs on one rank"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rows": 7}, "max_rows 7 cannot be divided among 2 ranks"),
        ({"token_budget": 31}, "token_budget 31 cannot be divided among 2 ranks"),
        ({"max_samples": 2}, "2 ranks cannot divide rows with drafts"),
        ({"pooling": Pooling.LAST}, "2 ranks cannot divide rows with pooling"),
        ({"pools": (PoolSpec("mamba", CacheKind.STATE, 9, 4),)}, r"rows with states \(mamba\)"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(fields: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"max_rows": 8, "token_budget": 32, "max_context": 64, "vocab_size": 9, "dp_ranks": 2}
    spec = RunnerSpec(**{"pools": (PoolSpec("full", CacheKind.FULL, 9, 4),), **sizes, **fields})
    with pytest.raises(ValueError, match=message):
        spec.check_ranks()


def give_one_row_to_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    build = KVCache.__init__

    def overlap(self: KVCache, *arguments: Any, own_rows: range | None = None, **options: Any) -> None:
        if own_rows is not None and own_rows.start:
            own_rows = range(own_rows.start - 1, own_rows.stop)
        build(self, *arguments, own_rows=own_rows, **options)

    monkeypatch.setattr(KVCache, "__init__", overlap)


def give_pages_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    give = KVCache.give

    def give_others(self: KVCache, rows: Index, columns: Index) -> None:
        other = self.groups[0]
        for one in getattr(self, "others", ()):
            if one is not self and one.groups[0].pool.num_free >= len(rows):
                other = one.groups[0]
        own, self.groups = self.groups, (other, *self.groups[1:])
        self._growing[0] = other
        give(self, rows, columns)
        self.groups = own
        self._growing[0] = own[0]

    build = DataParallelCache.__init__

    def introduce(self: DataParallelCache, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        for one in self.ranks:
            one.others = self.ranks  # type: ignore[attr-defined]

    monkeypatch.setattr(KVCache, "give", give_others)
    monkeypatch.setattr(DataParallelCache, "__init__", introduce)


def read_pages_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeRunner._first_of
    monkeypatch.setattr(FakeRunner, "_first_of", lambda self, group, rank, page: first(self, group, 0, page))


def count_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are cut to the tokens of a step, not to those of each rank."""
    share = Planner._share

    def of_all(self: Planner, decode: Any, work: list[int], allowance: int, *rest: Any) -> list[int]:
        self._rank_tokens = self._token_budget
        return share(self, decode, work, allowance * len(self._sharing), *rest)

    monkeypatch.setattr(Planner, "_share", of_all)


def let_a_rank_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_feed", lambda self, rank: None)


def leave_a_pin_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinsOfRanks, "leave_others", lambda self, pin, cache: None)


def let_a_pin_go_on_the_first_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def let_go(self: PinsOfRanks, pin: Pin) -> None:
        if pin in self._ranks[0].pins.held:
            self._ranks[0].pins.let_go(pin)

    monkeypatch.setattr(PinsOfRanks, "let_go", let_go)


def release_on_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached tokens of a request that ends go to the tree of another rank."""
    cache_prefix = DataParallelCache.cache_prefix

    def wrong(self: DataParallelCache, record: Any, *arguments: Any) -> None:
        of_row, self.of_row = self.of_row, lambda row: self.ranks[0]  # type: ignore[method-assign]
        cache_prefix(self, record, *arguments)
        self.of_row = of_row  # type: ignore[method-assign]

    monkeypatch.setattr(DataParallelCache, "cache_prefix", wrong)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], type[Simulation]] = {
    give_one_row_to_two_ranks: RankSimulation,
    give_pages_of_another_rank: RankSimulation,
    read_pages_of_the_first_rank: RankSimulation,
    count_tokens_of_all_ranks: RankSimulation,
    let_a_rank_starve: RankSimulation,
    release_on_the_first_rank: RankSimulation,
    leave_a_pin_behind: SessionSimulation,
    let_a_pin_go_on_the_first_rank_only: SessionSimulation,
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantError, AssertionError, RuntimeError, LookupError, ValueError)) as caught:
        simulate(1000, known_fault=True, sizes=RANKS | {"reuse": st.just(True)}, kind=FAULTS[plant])
    assert caught.traceback[-1].path != Path(__file__), "the fault itself failed, and nobody noticed it"


def test_a_plan_with_more_tokens_of_a_rank_than_its_part_is_refused() -> None:
    pool = PoolSpec("full", CacheKind.FULL, 9, 16)
    spec = RunnerSpec((pool,), 4, token_budget=8, max_context=32, vocab_size=9, dp_ranks=2)
    nothing = np.zeros(0, np.int32)

    def check(*query_lens: int) -> None:
        lens, rows = np.array(query_lens, np.int32), np.arange(len(query_lens), dtype=np.int32)
        deltas = (PageDeltas(nothing, nothing, nothing),)
        plan = StepPlan(7, rows, 0, lens, lens, np.zeros(sum(query_lens), np.int32), rows >= 0, deltas)
        check_plan(plan, spec, states=False)

    check(2, 2, 1, 3)
    with pytest.raises(ValueError, match="step 7 has 5 tokens of rank 1, which computes at most 4"):
        check(1, 1, 2, 3)
