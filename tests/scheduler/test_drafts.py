"""Rows that sample several tokens in a step: their output does not change, and no rejected draft is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.scheduling import VOCAB, Bench
from helpers.watch import Watch

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.runner.plan import DRAFT, INVALID_TOKEN, LAST_TOKEN
from sglang_jax.sampling.params import SamplingParams


def endless(tokens: int, seed: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True, **more)  # type: ignore[arg-type]


def prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + 3 * position) % (VOCAB - 2) for position in range(length)]


def drafting(**options: object) -> Bench:
    bench = Bench(**{"max_samples": 4, "budget": 64, **options})  # type: ignore[arg-type]
    bench.runner.keep_plans = True
    return bench


def test_drafts_change_only_the_number_of_steps() -> None:
    steps = []
    for max_samples in (1, 4):
        bench = drafting(max_samples=max_samples)
        for row in range(5):
            bench.add(prompt(9, row), sampling=endless(60, row))
        bench.run()
        bench.check_outputs()
        steps.append(len(bench.runner.plans))
    assert steps[1] < 0.75 * steps[0], "half of all drafts are right"


def test_a_plan_with_drafts_states_their_number() -> None:
    bench = drafting()
    bench.add(prompt(9), sampling=endless(60))
    for _ in range(4):
        bench.scheduler.step()
    first, second, third = bench.runner.plans[:3]
    assert (first.tokens.tolist(), first.num_decode) == (prompt(9), 0)
    assert second.tokens.tolist() == third.tokens.tolist() == [LAST_TOKEN, DRAFT, DRAFT, DRAFT]
    assert (second.query_lens.tolist(), second.kv_lens.tolist(), third.kv_lens.tolist()) == ([4], [13], [17])
    assert third.length_on_device is not None
    assert third.length_on_device.all()


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_length_limit_is_met_exactly(limit: int) -> None:
    bench = drafting()
    request = bench.add(prompt(9), sampling=endless(limit))
    bench.run()
    assert len(bench.channel.output(request)) == limit
    bench.check_outputs()
    assert max(int(plan.kv_lens.max()) for plan in bench.runner.plans) <= 9 + limit - 1


def test_tokens_behind_a_stop_token_are_neither_published_nor_cached() -> None:
    """At whatever position among the accepted drafts the stop token is."""
    longest = Oracle(VOCAB).output(prompt(9), 5, 40)
    for place in range(20):
        stop = longest[place]
        bench = drafting(page_size=1)
        sampling = SamplingParams(max_new_tokens=40, seed=5, ignore_eos=True, stop_token_ids=(stop,))
        request = bench.add(prompt(9), sampling=sampling, top_logprobs=0)
        bench.run()
        bench.check_outputs()
        output = bench.channel.output(request)
        assert output[-1] == stop
        assert [token for token, _ in bench.channel.logprobs[request]] == output
        whole = np.array([*prompt(9), *longest], np.int32).tobytes()
        assert bench.scheduler.cache.peek(whole, 1000, None) == 9 + len(output) - 1, "of the last token there is no KV"


def test_the_next_turn_matches_kv_that_steps_with_drafts_wrote() -> None:
    bench = drafting(page_size=1)
    first = bench.add(prompt(9), sampling=endless(30))
    bench.run()
    second = bench.add([*prompt(9), *bench.channel.output(first), 7], sampling=endless(30, 6))
    bench.run()
    bench.check_outputs()
    assert bench.channel.cached[second] == 9 + 30 - 1


def test_logprobs_are_those_of_each_token() -> None:
    told = []
    for max_samples in (1, 4):
        bench = drafting(max_samples=max_samples)
        request = bench.add(prompt(9), sampling=endless(30), top_logprobs=3)
        bench.run()
        told.append(bench.channel.logprobs[request])
    assert told[0] == told[1]
    assert len(told[0]) == 30


@pytest.mark.parametrize("window", [5, 18, 60])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_holds_pages_for_its_window_and_two_steps_at_any_acceptance(window: int, page_size: int) -> None:
    bench = drafting(max_samples=5, chunk=3, page_size=page_size, window=window, pages=128)
    request = bench.add(prompt(3), sampling=endless(100))
    watch = Watch(bench)  # it counts the pages
    while not bench.scheduler.idle:
        watch.step()
    bench.check_outputs()
    assert len(bench.channel.output(request)) == 100


def test_steps_have_no_drafts_where_pages_are_short() -> None:
    """A request that fits only without others, to the last page."""
    bench = drafting(page_size=1, pages=39, context=40)
    bench.add(prompt(9), sampling=endless(31))
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.log.counts.retractions == 0
    assert [finished.kind for finished in bench.channel.finished.values()] == ["length"]


def test_prompts_get_their_tokens_in_steps_with_drafts() -> None:
    bench = drafting(rows=8, budget=16, chunk=8, pages=400)
    for row in range(7):
        bench.add(prompt(3, row), sampling=endless(100, row))
    while bench.scheduler.num_running < 7:
        bench.scheduler.step()
    late = bench.add(prompt(40, 9), sampling=endless(1))
    for _ in range(14):
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
    assert late in bench.channel.finished
    bench.run()
    bench.check_outputs()


def test_logits_that_are_not_finite_behind_a_draft_end_only_their_request() -> None:
    longest = Oracle(VOCAB).output(prompt(9), 5, 40)
    bad = next(token for place, token in enumerate(longest) if place > 3 and token not in longest[:place])
    bench = drafting(invalid_token=bad)
    request = bench.add(prompt(9), sampling=endless(40))
    other = bench.add(prompt(9, 2), sampling=endless(8, 6))
    bench.run()
    assert bench.channel.finished[request].kind == "error"
    streamed = bench.channel.streams[request]
    assert streamed == longest[: len(streamed)]
    assert INVALID_TOKEN not in streamed
    bad_for_other = bad in [*prompt(9, 2), *bench.wanted[other][:-1]]
    assert bench.channel.finished[other].kind == ("error" if bad_for_other else "length")


def test_an_aborted_row_releases_the_pages_of_its_drafts() -> None:
    bench = drafting(page_size=1)
    request = bench.add(prompt(9), sampling=endless(60))
    for _ in range(4):
        bench.scheduler.step()
    bench.scheduler.abort(request)
    bench.run()
    check_everything(bench.scheduler.cache)
    assert bench.scheduler.idle


def test_the_simulated_drafts_are_accepted_about_half_of_the_time() -> None:
    """At times no draft is accepted, at times all: the simulator meets every count."""
    bench = drafting()
    counts: list[int] = []
    run = FakeRunner._run

    def noting(*arguments: Any) -> object:
        result = run(bench.runner, *arguments)
        counts.extend(result.counts.tolist())
        return result

    bench.runner._run = noting  # type: ignore[assignment, method-assign]
    bench.add(prompt(9), sampling=endless(100))
    bench.run()
    assert set(counts) == {1, 2, 3, 4}


def test_a_retracted_request_keeps_its_output_for_drafting_and_its_counts() -> None:
    """Drafts are searched in its whole text, and its acceptance is reported over all of its rows."""
    bench = drafting()
    request = bench.add(prompt(9), sampling=endless(60))
    while not bench.scheduler.log.counts.accepted_tokens > 4:
        bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    before = bench.scheduler.log.counts.draft_tokens
    assert bench.scheduler.retract_newest()
    bench.run()
    bench.check_outputs()
    texts = [text.tokens.tolist() for plan in bench.runner.plans for text in plan.row_updates.texts]
    first, again = texts
    assert first == prompt(9)
    assert again == (prompt(9) + bench.channel.output(request))[: len(again)]
    assert len(again) > len(first) + 4
    counts = bench.channel.finished[request].drafts
    assert counts is not None
    assert counts.drafts == bench.scheduler.log.counts.draft_tokens > before
