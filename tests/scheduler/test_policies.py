"""The order in which requests are admitted."""

from __future__ import annotations

import pytest
from helpers.scheduling import Bench

from sglang_jax.config import SchedulePolicy
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.policies import LONGEST_PREFIX_WINDOW, LongestPrefixFirst
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.waiting_queue import WaitingQueue

PREFIX = [1 + (5 * i) % 37 for i in range(16)]


def one_at_a_time(policy: SchedulePolicy) -> Bench:
    """A single row, so that the order of the first tokens is the order of admission."""
    return Bench(rows=1, options={"schedule_policy": policy})


def sampling(tokens: int = 2) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=1, ignore_eos=True)


def order(bench: Bench) -> list[int]:
    """Requests by the time they started."""
    return list(bench.channel.cached)


def test_first_come_first_served() -> None:
    bench = one_at_a_time(SchedulePolicy.FCFS)
    ids = [bench.add([k], sampling=sampling(k), priority=k) for k in (3, 1, 2)]
    bench.run()
    assert order(bench) == ids


def test_longest_cached_prefix_first_and_ties_by_arrival() -> None:
    bench = one_at_a_time(SchedulePolicy.LPM)
    bench.add(PREFIX, sampling=sampling())
    bench.run()
    none, four, sixteen, other = (
        bench.add(tokens, sampling=sampling()) for tokens in ([39, 38], [*PREFIX[:4], 39], [*PREFIX, 39], [38, 38])
    )
    bench.run()
    assert order(bench)[1:] == [sixteen, four, none, other]
    bench.check_outputs()


def test_longest_allowed_output_first() -> None:
    bench = one_at_a_time(SchedulePolicy.LOF)
    short, long, medium, also_long = (bench.add([9], sampling=sampling(n)) for n in (2, 9, 5, 9))
    bench.run()
    assert order(bench) == [long, also_long, medium, short]


def test_highest_priority_first() -> None:
    bench = one_at_a_time(SchedulePolicy.PRIORITY)
    low, high, middle, also_high = (bench.add([9], sampling=sampling(), priority=p) for p in (-1, 5, 0, 5))
    bench.run()
    assert order(bench) == [high, also_high, middle, low]


def test_looking_for_the_longest_prefix_costs_no_more_than_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: matching the whole queue at each step cost more than the step."""
    bench = one_at_a_time(SchedulePolicy.LPM)
    bench.add(PREFIX, sampling=sampling())
    bench.run()
    first = bench.add([39], sampling=sampling())
    for k in range(300):
        bench.add([38, k % 37], sampling=sampling())
    beyond = bench.add([*PREFIX, 39], sampling=sampling())
    peeks: list[int] = []
    peek = KVCache.peek
    monkeypatch.setattr(KVCache, "peek", lambda self, *arguments: peeks.append(1) or peek(self, *arguments))
    bench.scheduler.step()
    assert len(peeks) == LONGEST_PREFIX_WINDOW
    bench.scheduler.step()
    assert len(peeks) == LONGEST_PREFIX_WINDOW, "nobody can be admitted, so nobody is looked at"
    bench.run()
    assert order(bench)[1] == first
    assert order(bench).index(beyond) < 300, "it came into the window as the queue moved on"


def test_beyond_the_window_the_order_is_by_arrival() -> None:
    bench = Bench(rows=200, budget=400, options={"schedule_policy": SchedulePolicy.LPM})
    ids = [bench.add([k % 37], sampling=sampling()) for k in range(300)]
    peeked: list[int] = []

    def cached_prefix(request: Request) -> int:
        peeked.append(request.id)
        return request.id

    queue = WaitingQueue(LongestPrefixFirst(cached_prefix), cached_prefix)
    for request in bench.scheduler.queue.requests():
        queue.add(request)
    peeked.clear()
    assert [request.id for request in queue.first(250)] == ids[127::-1] + ids[128:250]
    assert sorted(peeked) == ids[:128]


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_retracted_request_goes_before_its_equals_whatever_the_policy(policy: SchedulePolicy) -> None:
    """At the tail it could starve."""
    bench = one_at_a_time(policy)
    victim = bench.add([7], sampling=sampling(6), priority=9)
    bench.scheduler.step()
    for k in range(3):
        bench.add([8, k], sampling=sampling(20), priority=9)
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.retract_newest()
    assert bench.scheduler.queue.requests()[0].id == victim
    assert next(bench.scheduler.queue.first(1)).id == victim
    bench.run()
    assert next(iter(bench.channel.finished)) == victim
    bench.check_outputs()


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_retracted_requests_come_back_oldest_first(policy: SchedulePolicy) -> None:
    bench = Bench(rows=2, options={"schedule_policy": policy})
    bench.add(PREFIX, sampling=sampling())
    bench.run()
    older = bench.add([39, 38], sampling=sampling(6))
    newer = bench.add([*PREFIX, 39], sampling=sampling(6))
    bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.retract_newest()
    assert bench.scheduler.retract_newest()
    assert [request.id for request in bench.scheduler.queue.first(2)] == [older, newer]
    bench.run()
    bench.check_outputs()


def test_a_retracted_request_does_not_go_before_a_higher_priority() -> None:
    """Regression: a request of priority 10 waited 1,900 steps behind retracted ones of priority 0."""
    bench = one_at_a_time(SchedulePolicy.PRIORITY)
    victim = bench.add([7], sampling=sampling(6))
    bench.scheduler.step()
    urgent = bench.add([8], sampling=sampling(4), priority=10)
    equal = bench.add([9], sampling=sampling(4))
    bench.scheduler.drain_in_flight()
    assert bench.scheduler.retract_newest()
    assert [request.id for request in bench.scheduler.queue.requests()] == [urgent, victim, equal]
    bench.run()
    assert list(bench.channel.finished) == [urgent, victim, equal]
    bench.check_outputs()
