"""Requests that share a prefix: it is computed once, by the request that came first."""

from __future__ import annotations

import pytest
from helpers.scheduling import Bench

from sglang_jax.runner.plan import StepPlan
from sglang_jax.sampling.params import SamplingParams

ALIKE = [1 + (7 * i) % 37 for i in range(30)]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def chunks(plans: list[StepPlan]) -> list[list[int]]:
    """Lengths of the prefill chunks of each step."""
    return [plan.query_lens[plan.num_decode :].tolist() for plan in plans]


def kept_plans(bench: Bench) -> list[StepPlan]:
    bench.runner.keep_plans = True
    return bench.runner.plans


def test_the_second_of_two_equal_prompts_waits_a_step_and_matches_the_first() -> None:
    """Side by side both would be computed, and one of the two copies thrown away."""
    bench = Bench(chunk=64, budget=64)
    plans = kept_plans(bench)
    first = bench.add(ALIKE[:14], sampling=endless(4))
    second = bench.add(ALIKE[:14], sampling=endless(4, seed=6))
    bench.run()
    assert chunks(plans)[:3] == [[14], [2], []]
    assert bench.channel.cached == {first: 0, second: 12}
    bench.check_outputs()


def test_a_sharer_waits_until_the_last_chunk_of_the_shared_prefix() -> None:
    bench = Bench(chunk=8)
    plans = kept_plans(bench)
    bench.add(ALIKE[:24], sampling=endless(4))
    second = bench.add([*ALIKE[:24], 3, 4], sampling=endless(4))
    bench.run()
    assert chunks(plans)[:4] == [[8], [8], [8], [2]]
    assert bench.channel.cached[second] == 24
    bench.check_outputs()


def test_a_sharer_of_the_first_pages_starts_as_soon_as_they_are_cached() -> None:
    bench = Bench(chunk=8, budget=32)
    plans = kept_plans(bench)
    bench.add(ALIKE[:30], sampling=endless(4))
    second = bench.add([*ALIKE[:8], 39, 39], sampling=endless(4))
    bench.run()
    assert bench.channel.cached[second] == 8
    assert chunks(plans)[:4] == [[8], [6, 2], [8], [8]], "it waited a step, and takes its part of the next"


def test_unrelated_requests_overtake_those_that_wait_for_a_prefix() -> None:
    """Regression: a gate that held all requests while one prefix was computed halved the throughput."""
    bench = Bench(chunk=16, budget=32)
    plans = kept_plans(bench)
    bench.add(ALIKE[:14], sampling=endless(4))
    sharer = bench.add(ALIKE[:14], sampling=endless(4))
    other = bench.add([39, 38], sampling=endless(4))
    bench.scheduler.step()
    assert chunks(plans) == [[14, 2]]
    assert set(bench.scheduler.requests) - {r.id for r in bench.scheduler.queue.requests()} == {1, other}
    bench.run()
    assert bench.channel.cached[sharer] == 12
    bench.check_outputs()


@pytest.mark.parametrize("sharers", [2, 8, 15])
def test_many_requests_that_share_a_long_prefix_compute_it_once(sharers: int) -> None:
    """Reported of other engines: groups that share 1000 tokens, and `cached-token: 0` for every first sharer."""
    bench = Bench(pages=600, page_size=4, rows=16, chunk=256, budget=512, context=1200, scribble=False)
    plans = kept_plans(bench)
    prefix = [1 + (i * i) % 37 for i in range(1000)]
    for k in range(sharers):
        bench.add([*prefix, 1 + k, 2, 3], sampling=endless(3, seed=k))
    bench.run()
    assert sum(sum(step) for step in chunks(plans)) == 1003 + 3 * (sharers - 1)
    assert list(bench.channel.cached.values()) == [0] + [1000] * (sharers - 1)
    bench.check_outputs()


def test_without_reuse_no_request_waits_for_a_prefix_and_nothing_is_shared() -> None:
    bench = Bench(chunk=32, options={"disable_radix_cache": True})
    plans = kept_plans(bench)
    bench.add(ALIKE[:14], sampling=endless(4))
    bench.add(ALIKE[:14], sampling=endless(4))
    bench.run()
    assert chunks(plans)[0] == [14, 14]
    assert set(bench.channel.cached.values()) == {0}
    assert bench.scheduler.cache.tree.num_nodes == 0
    bench.check_outputs()


def test_namespaces_neither_wait_nor_share() -> None:
    """Reported of other engines: an extra key, an adapter or a salt was ignored, and one tenant got KV of another."""
    bench = Bench(chunk=64, budget=64)
    plans = kept_plans(bench)
    ids = [bench.add(ALIKE[:14], sampling=endless(4), extra_key=key) for key in (None, "a", "b", "")]
    bench.run()
    assert chunks(plans)[0] == [14, 14, 14, 14]
    assert [bench.channel.cached[request] for request in ids] == [0, 0, 0, 0]
    again = bench.add(ALIKE[:14], sampling=endless(4), extra_key="a")
    bench.run()
    assert bench.channel.cached[again] == 12
    bench.check_outputs()


def test_sharers_continue_when_the_request_they_wait_for_is_aborted() -> None:
    bench = Bench(chunk=8)
    leader = bench.add(ALIKE, sampling=endless(4))
    sharers = [bench.add([*ALIKE, k], sampling=endless(4)) for k in (2, 3)]
    bench.scheduler.step()
    bench.scheduler.abort(leader)
    bench.run()
    assert [bench.channel.cached[request] for request in sharers] == [8, 28]
    assert [bench.channel.finished[request].kind for request in sharers] == ["length", "length"]
    bench.check_outputs()


def test_copies_of_a_prefix_that_was_computed_twice_are_merged() -> None:
    """Prompt logprobs forbid a match, so the prefix is computed again: the row must end on the tree's copy, and its own
    pages must be freed once the step that writes them is over."""
    bench = Bench(chunk=64, budget=64)
    bench.add(ALIKE[:16], sampling=endless(20))
    bench.scheduler.step()
    second = bench.add(ALIKE[:16], sampling=endless(20), logprob_start=0, top_logprobs=0)
    bench.scheduler.step()
    bench.scheduler.step()
    cache = bench.scheduler.cache
    rows = sorted(cache.open_rows)
    assert bench.channel.cached[second] == 0
    assert cache.groups[0].table.run(rows[0], 0, 4).tolist() == cache.groups[0].table.run(rows[1], 0, 4).tolist()
    assert cache.groups[0].component.protected == 4
    bench.run()
    assert cache.retired_pages == 0
    bench.check_outputs()


def test_a_follow_up_turn_matches_the_whole_conversation_so_far() -> None:
    """KV of prompt and output is kept, rounded down to whole pages."""
    bench = Bench()
    first = bench.add(ALIKE[:10], sampling=endless(7))
    bench.run()
    turn = [*ALIKE[:10], *bench.channel.output(first)]
    second = bench.add([*turn, 5, 6, 7, 8], sampling=endless(3))
    bench.run()
    assert len(turn) == 17
    assert bench.channel.cached[second] == 16
    bench.check_outputs()
