"""Logprobs of prompts and outputs, for any chunks, cache content and retractions."""

from __future__ import annotations

import pytest
from helpers.scheduling import Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.runner.plan import LOGPROB_BUCKETS, NO_LOGPROBS
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import StepOutputs, WireLogprob

PROMPT = [1 + (7 * i * i) % 37 for i in range(24)]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def expected(bench: Bench, prompt: list[int], start: int) -> list[tuple[int, float | None]]:
    """(token, logprob) from position `start` on; nothing predicts the first token."""
    logprobs: list[float | None] = [None, *bench.oracle.prompt_logprobs(prompt)]
    return list(zip(prompt, logprobs, strict=True))[start:]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 23])
def test_prompt_logprobs_across_chunks(chunk: int, start: int) -> None:
    """The last token of a chunk predicts the first of the next, whose logprob is easily forgotten."""
    bench = Bench(chunk=chunk, budget=64)
    request = bench.add(PROMPT, sampling=endless(3), logprob_start=start, top_logprobs=0)
    bench.run()
    assert bench.channel.prompt_logprobs[request] == expected(bench, PROMPT, start)
    bench.check_outputs()


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (5, 4), (8, 4), (9, 8), (23, 20), (-1, 20)])
def test_a_cached_prefix_is_used_up_to_the_first_requested_logprob(start: int, cached: int) -> None:
    """A position that is not run has no logits."""
    bench = Bench()
    bench.add(PROMPT, sampling=endless(3))
    bench.run()
    request = bench.add(PROMPT, sampling=endless(3), logprob_start=start, top_logprobs=0)
    bench.run()
    assert bench.channel.cached[request] == cached
    wanted = [] if start < 0 else expected(bench, PROMPT, start)
    assert bench.channel.prompt_logprobs.get(request, []) == wanted
    bench.check_outputs()


@given(
    chunk=st.sampled_from([1, 3, 5, 16]),
    start=st.integers(0, 23),
    cached=st.integers(0, 24),
    steps=st.lists(st.integers(1, 9), max_size=3),
    page_size=st.sampled_from([1, 4, 16]),
)
@settings(max_examples=60, deadline=None)
def test_each_prompt_logprob_comes_once_whatever_happens(
    chunk: int, start: int, cached: int, steps: list[int], page_size: int
) -> None:
    """After a retraction in the middle, published logprobs are not computed again, and none is left out."""
    bench = Bench(page_size=page_size, chunk=chunk)
    if cached:
        bench.add(PROMPT[:cached], sampling=endless(1))
        bench.run()
    request = bench.add(PROMPT, sampling=endless(4), logprob_start=start, top_logprobs=0)
    for count in steps:
        for _ in range(count):
            bench.scheduler.step()
        bench.scheduler.drain_in_flight()
        bench.scheduler.retract_newest()
    bench.run()
    assert bench.channel.prompt_logprobs[request] == expected(bench, PROMPT, start)
    assert [token for token, _ in bench.channel.logprobs[request]] == bench.wanted[request]
    bench.check_outputs()


def test_prompt_logprobs_come_before_the_first_output_token() -> None:
    bench = Bench(chunk=8)
    request = bench.add(PROMPT, sampling=endless(3), logprob_start=0)
    seen = 0
    while not bench.channel.streams.get(request):
        bench.scheduler.step()
        told = len(bench.channel.prompt_logprobs.get(request, []))
        assert told >= seen
        seen = told
    assert seen == len(PROMPT)
    bench.run()
    assert len(bench.channel.prompt_logprobs[request]) == len(PROMPT)


@pytest.mark.parametrize(("prompt", "start"), [([9], 0), ([9, 8], 1), ([9], 5), (PROMPT, 99)])
def test_short_prompts_and_starts_beyond_the_end(prompt: list[int], start: int) -> None:
    bench = Bench()
    request = bench.add(prompt, sampling=endless(2), logprob_start=start)
    bench.run()
    assert bench.channel.prompt_logprobs.get(request, []) == expected(bench, prompt, start)
    bench.check_outputs()


def test_an_aborted_request_publishes_nothing_more() -> None:
    bench = Bench(chunk=8)
    request = bench.add(PROMPT, sampling=endless(3), logprob_start=0, top_logprobs=1)
    for _ in range(2):
        bench.scheduler.step()
    told = list(bench.channel.prompt_logprobs[request])
    bench.scheduler.abort(request)
    bench.run()
    assert bench.channel.prompt_logprobs[request] == told


def entries(bench: Bench) -> dict[int, list[WireLogprob]]:
    """Output logprobs by request."""
    found: dict[int, list[WireLogprob]] = {}
    for message in bench.channel.messages:
        if isinstance(message, StepOutputs):
            for request, entry in message.logprobs:
                found.setdefault(request, []).append(entry)
    return found


def test_a_step_computes_the_smallest_bucket_and_each_request_gets_its_own_count() -> None:
    """A separate count for each mixture of requests would compile a program for each mixture."""
    bench = Bench(rows=4, chunk=64, budget=64)
    bench.runner.keep_plans = True
    wishes = [(12, 0), (8, 1), (6, 3), (4, 20)]
    asked = {
        bench.add([9, k], sampling=endless(tokens), top_logprobs=top): top for k, (tokens, top) in enumerate(wishes)
    }
    bench.run()
    buckets = [plan.top_logprobs for plan in bench.runner.plans]
    assert buckets == [20] * 4 + [5] * 2 + [1] * 2 + [0] * 4
    assert set(buckets) <= set(LOGPROB_BUCKETS)
    found = entries(bench)
    for request, top in asked.items():
        assert [entry.token_id for entry in found[request]] == bench.wanted[request]
        assert {len(entry.top_ids) for entry in found[request]} == {top}
        assert {len(entry.top_logprobs) for entry in found[request]} == {top}


def test_no_logprobs_are_computed_when_none_are_requested() -> None:
    bench = Bench(chunk=8)
    bench.runner.keep_plans = True
    plain = bench.add([9, 9], sampling=endless(12))
    bench.scheduler.step()
    asks = bench.add(PROMPT, sampling=endless(2), top_logprobs=2)
    bench.run()
    assert [plan.top_logprobs for plan in bench.runner.plans] == [NO_LOGPROBS] * 3 + [5, 5] + [NO_LOGPROBS] * 7
    assert set(entries(bench)) == {asks}
    bench.check_outputs()
    assert plain not in bench.channel.logprobs


def test_a_row_does_not_inherit_the_options_of_its_last_request() -> None:
    bench = Bench(rows=1)
    bench.runner.keep_plans = True
    bench.add([9, 9], sampling=endless(3), top_logprobs=5)
    after = bench.add([9, 8], sampling=endless(3))
    bench.run()
    assert [plan.top_logprobs for plan in bench.runner.plans][-3:] == [NO_LOGPROBS] * 3
    assert after not in bench.channel.logprobs
    assert bench.scheduler.rows.num_with_logprobs == 0


def test_prompt_alternatives_use_buckets_too() -> None:
    bench = Bench(chunk=64, budget=64)
    bench.runner.keep_plans = True
    plain = bench.add([9, 9, 9, 9, 9], sampling=endless(2), logprob_start=0)
    three = bench.add([8, 9, 9, 9, 9], sampling=endless(2), logprob_start=0, top_logprobs=3)
    bench.run()
    assert bench.runner.plans[0].prompt_top_logprobs == 5
    told = {
        request: [len(entry.top_ids) for entry in found]
        for message in bench.channel.messages
        if isinstance(message, StepOutputs)
        for request, found in message.prompt_logprobs
        if found[0].logprob is not None
    }
    assert told == {plain: [0] * 4, three: [3] * 4}
