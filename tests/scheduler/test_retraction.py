"""Retraction: what happens when pages are short."""

from __future__ import annotations

import pytest
from helpers.scheduling import EOS, Bench

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.reserve import DECAY_STEPS, RAISE, NewTokenReserve

GREEDY = {"schedule_conservativeness": 0.01}
"""Admits with almost no room kept for output, so that shortages come."""


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def prompt(length: int, first: int = 1) -> list[int]:
    return [first, *((3 * i + first) % 37 + 1 for i in range(length - 1))]


def run_checked(bench: Bench) -> None:
    for _ in range(500):
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
        if bench.scheduler.idle:
            return
    raise AssertionError("not idle")


def note_retractions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Records (retracted request, all requests that had a row) for each retraction."""
    noted: list[tuple[int, list[int]]] = []
    retract = Finisher.retract

    def noting(self: Finisher, request: Request) -> None:
        noted.append((request.id, [other.id for other in self._rows.requests if other is not None]))
        retract(self, request)

    monkeypatch.setattr(Finisher, "retract", noting)
    return noted


def test_the_newest_returns_to_the_head_of_the_queue_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the tail it may starve; without its output, clients would see their stream start over."""
    bench = Bench(pages=8, rows=2, options=GREEDY)
    noted = note_retractions(monkeypatch)
    first = bench.add(prompt(8), sampling=endless(16))
    second = bench.add(prompt(8, first=2), sampling=endless(16))
    third = bench.add(prompt(24, first=3), sampling=endless(2))
    while not noted:
        bench.scheduler.step()
    assert noted == [(second, [first, second])]
    head = bench.scheduler.queue.requests()[0]
    assert (head.id, head.state, head.kv) == (second, RequestState.RETRACTED, None)
    streamed = bench.channel.streams[second]
    assert 0 < len(streamed) < 16
    assert head.prefill_len == 8 + len(streamed)
    assert bench.scheduler.queue.requests()[1].id == third
    run_checked(bench)
    assert list(bench.channel.cached) == [first, second, third], "a request is said to start once"
    assert [bench.channel.finished[request].num_tokens for request in (first, second, third)] == [16, 16, 2]
    bench.check_outputs()


def test_no_retraction_while_the_step_in_flight_frees_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a healthy request was retracted though the end of another, already in flight, made room."""
    bench = Bench(pages=4, rows=2, options=GREEDY)
    noted = note_retractions(monkeypatch)
    ends = bench.add(prompt(4), sampling=endless(5))
    goes_on = bench.add(prompt(4, first=2), sampling=endless(9))
    run_checked(bench)
    assert not noted
    assert bench.scheduler.cache.num_evicted > 0, "there was a shortage"
    assert bench.channel.finished[ends].kind == bench.channel.finished[goes_on].kind == "length"
    bench.check_outputs()


def test_cached_prefixes_are_evicted_before_a_running_request_is_retracted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=8, rows=2, options=GREEDY)
    noted = note_retractions(monkeypatch)
    bench.add(prompt(16), sampling=endless(1))
    bench.run()
    assert bench.scheduler.cache.groups[0].component.evictable == 4
    bench.add(prompt(20, first=2), sampling=endless(12))
    run_checked(bench)
    assert not noted
    assert bench.scheduler.cache.num_evicted == 4
    bench.check_outputs()


@pytest.mark.parametrize("reuse", [True, False])
def test_the_oldest_is_never_retracted_so_that_all_end(reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests that retract each other alternately never end."""
    bench = Bench(pages=9, rows=6, options=GREEDY | {"disable_radix_cache": not reuse})
    noted = note_retractions(monkeypatch)
    for k in range(1, 9):
        bench.add(prompt(4 + k, first=k), sampling=endless(20))
    run_checked(bench)
    assert len(noted) >= 3
    assert all(victim == max(running) and len(running) > 1 for victim, running in noted)
    assert {finished.kind for finished in bench.channel.finished.values()} == {"length"}
    bench.check_outputs()
    assert bench.scheduler.log.counts.retractions == len(noted)


def test_retraction_in_the_middle_of_a_prompt() -> None:
    bench = Bench(chunk=4)
    bench.add(prompt(6), sampling=endless(20))
    victim = bench.add(prompt(30, first=2), sampling=endless(5))
    for _ in range(5):
        bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.requests[victim].state is RequestState.PREFILL
    assert bench.scheduler.retract_newest()
    check_everything(bench.scheduler.cache)
    assert bench.scheduler.requests[victim].state is RequestState.RETRACTED
    run_checked(bench)
    bench.check_outputs()


def test_the_least_urgent_goes_before_the_newest() -> None:
    bench = Bench(options={"schedule_policy": "priority"})
    urgent, casual = (bench.add(prompt(4, first=k), sampling=endless(9), priority=2 - k) for k in (0, 1))
    also_urgent = bench.add(prompt(4, first=2), sampling=endless(9), priority=2)
    bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    gone = []
    for _ in range(3):
        before = {r.id for r in bench.scheduler.queue.requests()}
        assert bench.scheduler.retract_newest()
        gone += [r.id for r in bench.scheduler.queue.requests() if r.id not in before]
    assert gone == [casual, also_urgent, urgent]
    assert not bench.scheduler.retract_newest()
    run_checked(bench)
    bench.check_outputs()


class TestCapacity:
    def test_only_the_last_request_that_cannot_fit_fails(self) -> None:
        bench = Bench(pages=4, context=64, options=GREEDY)
        greedy = bench.add(prompt(6), sampling=endless(40))
        modest = bench.add(prompt(3, first=2), sampling=endless(5))
        run_checked(bench)
        finished = bench.channel.finished[greedy]
        assert finished.kind == "error"
        assert finished.error is not None
        assert finished.error.name == "CapacityError"
        assert finished.error.code == "kv_capacity_exceeded"
        assert finished.error.message == (
            "the request needs KV of 17 tokens, which does not fit even without other requests: the pool holds 16; "
            "raise max_total_tokens"
        )
        assert bench.channel.streams[greedy] == bench.wanted[greedy][: len(bench.channel.streams[greedy])]
        assert bench.channel.finished[modest].kind == "length"
        bench.check_outputs()

    def test_a_pool_may_be_filled_to_the_last_slot(self) -> None:
        """KV of the last sampled token is never written, so 17 tokens fit into 16 slots."""
        bench = Bench(pages=4, context=64)
        exact = bench.add(prompt(6), sampling=endless(11))
        run_checked(bench)
        assert bench.channel.finished[exact].kind == "length"
        bench.check_outputs()

    @pytest.mark.parametrize("limit", [50, None])
    def test_a_request_without_others_is_admitted_whatever_it_may_sample(self, limit: int | None) -> None:
        """Most requests end long before their limit; one that waits for room for all of its output would wait
        forever."""
        bench = Bench(pages=4, context=64)
        seed = next(s for s in range(1000) if len(bench.oracle.output(prompt(14), s, 3, (EOS,))) < 3)
        request = bench.add(prompt(14), sampling=SamplingParams(max_new_tokens=limit, seed=seed))
        run_checked(bench)
        assert bench.channel.finished[request].kind == "stop"
        bench.check_outputs()

    def test_a_prompt_larger_than_the_pool_is_refused_at_once(self) -> None:
        bench = Bench(pages=4, context=64)
        large = bench.add(prompt(17), sampling=endless(2))
        fits = bench.add(prompt(16, first=2), sampling=endless(1))
        run_checked(bench)
        finished = bench.channel.finished[large]
        assert finished.error is not None
        assert finished.error.name == "CapacityError"
        assert finished.error.message == "17 tokens do not fit the KV pool of 16; raise max_total_tokens"
        assert large not in bench.channel.cached
        assert bench.channel.finished[fits].kind == "length"
        bench.check_outputs()

    def test_a_prompt_larger_than_the_pool_delays_no_other(self) -> None:
        """Regression: at the head of the queue it blocked all behind it until every running request had ended."""
        bench = Bench(pages=8, rows=4, context=64)
        running = bench.add(prompt(4), sampling=endless(12))
        bench.scheduler.step()
        large = bench.add(prompt(33, first=2), sampling=endless(2))
        behind = bench.add(prompt(3, first=3), sampling=endless(2))
        bench.scheduler.step()
        assert large in bench.channel.finished
        assert behind in bench.channel.cached
        assert running not in bench.channel.finished
        run_checked(bench)
        bench.check_outputs()


class TestReserve:
    def test_it_starts_high_and_decays_to_its_floor(self) -> None:
        """Room kept for all output leaves the pool half empty; no room at all means endless retractions."""
        reserve = NewTokenReserve()
        start = reserve.ratio
        for _ in range(DECAY_STEPS // 2):
            reserve.decay()
        halfway = reserve.ratio
        for _ in range(DECAY_STEPS):
            reserve.decay()
        assert (start, reserve.ratio) == pytest.approx((0.7, 0.1))
        assert halfway == pytest.approx((start + reserve.ratio) / 2)

    def test_a_retraction_raises_it_up_to_everything(self) -> None:
        reserve = NewTokenReserve()
        assert reserve.ratio == pytest.approx(0.7)
        reserve.raise_ratio()
        assert reserve.ratio == pytest.approx(0.7 + RAISE)
        for _ in range(9):
            reserve.raise_ratio()
        assert reserve.ratio == 1.0

    @pytest.mark.parametrize("conservativeness", [0.01, 0.1, 1.0])
    def test_a_raise_is_forgotten_as_fast_at_any_conservativeness(self, conservativeness: float) -> None:
        """Regression: the raise did not scale with conservativeness and the decay did: at 0.1 a retraction had an
        effect for 2,000 steps, not 200."""
        reserve = NewTokenReserve(conservativeness)
        for _ in range(DECAY_STEPS):
            reserve.decay()
        floor = reserve.ratio
        reserve.raise_ratio()
        steps = 0
        while reserve.ratio > floor * 1.001:
            reserve.decay()
            steps += 1
        assert steps == pytest.approx(200, abs=1)

    def test_conservativeness_never_keeps_more_than_everything(self) -> None:
        assert NewTokenReserve(50.0).ratio == 1.0

    def test_steps_decay_it_and_retractions_raise_it(self) -> None:
        bench = Bench()
        bench.add(prompt(4), sampling=endless(40))
        bench.add(prompt(4, first=2), sampling=endless(40))
        for _ in range(10):
            bench.scheduler.step()
        before = bench.scheduler.reserve.ratio
        assert before < 0.7
        bench.scheduler.drain_in_flight()
        before = bench.scheduler.reserve.ratio
        bench.scheduler.retract_newest()
        assert bench.scheduler.reserve.ratio == pytest.approx(before + RAISE)

    def test_with_room_kept_no_request_is_retracted(self) -> None:
        def retractions(conservativeness: float) -> int:
            bench = Bench(pages=16, rows=8, options={"schedule_conservativeness": conservativeness})
            for k in range(1, 9):
                bench.add(prompt(4, first=k), sampling=endless(16))
            run_checked(bench)
            bench.check_outputs()
            return bench.scheduler.log.counts.retractions

        assert retractions(10.0) == 0
        assert retractions(0.01) > 0

    def test_a_request_that_does_not_fit_next_to_others_is_tried_again_later(self) -> None:
        """A refusal must leave no lock and no row behind, and must not be final."""
        bench = Bench(pages=8, rows=4)
        first = bench.add(prompt(12), sampling=endless(8))
        bench.scheduler.step()
        second = bench.add(prompt(12, first=2), sampling=endless(8))
        third = bench.add(prompt(2, first=3), sampling=endless(2))
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
        assert len(bench.scheduler.cache.open_rows) == 2
        assert [request.id for request in bench.scheduler.queue.requests()] == [second], "the third fits beside"
        run_checked(bench)
        assert list(bench.channel.cached) == [first, third, second]
        bench.check_outputs()
