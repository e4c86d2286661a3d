"""Drafts only take tokens and pages that no other request needs, and rejected drafts harm no other request."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.scheduling import VOCAB, Bench

from sglang_jax.architectures import CacheKind
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.runner.plan import (
    DRAFT,
    LAST_TOKEN,
    PageDeltas,
    PoolSpec,
    RunnerSpec,
    SlotCopies,
    StepPlan,
    check_plan,
)
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.chunking import TimedChunk
from sglang_jax.scheduler.scheduler import Scheduler

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

NOTHING = np.zeros(0, np.int32)
ONE_SAMPLE = RunnerSpec((PoolSpec("full", CacheKind.FULL, 9, 16),), 1, token_budget=2, max_context=32, vocab_size=9)


def endless(tokens: int, seed: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True, **more)  # type: ignore[arg-type]


def prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + 3 * position) % (VOCAB - 2) for position in range(length)]


def drafting(**options: object) -> Bench:
    bench = Bench(**{"max_samples": 4, "budget": 64, **options})  # type: ignore[arg-type]
    bench.runner.keep_plans = True
    return bench


@pytest.mark.parametrize("max_samples", [1, 4])
def test_logits_behind_a_stop_token_fail_no_request(max_samples: int) -> None:
    """Behind its last token a model owes nothing, so logits may be non-finite there."""
    longest = Oracle(VOCAB).output(prompt(9), 5, 40)
    for place in range(20):
        stop = longest[place]
        bench = drafting(max_samples=max_samples, invalid_token=stop)
        if stop in prompt(9)[-1:]:
            continue
        sampling = SamplingParams(max_new_tokens=40, seed=5, ignore_eos=True, stop_token_ids=(stop,))
        request = bench.add(prompt(9), sampling=sampling)
        bench.run()
        assert bench.channel.finished[request].kind == "stop", f"stopped by its token {place}"
        bench.check_outputs()


def test_tokens_before_bad_logits_are_published_as_without_drafts() -> None:
    """The tokens that a row samples do not depend on drafts, so those that its client has when it fails must not
    either."""
    longest = Oracle(VOCAB).output(prompt(9), 5, 40)
    for bad in dict.fromkeys(longest[3:]):
        told = []
        for max_samples in (1, 4):
            bench = drafting(max_samples=max_samples, invalid_token=bad)
            request = bench.add(prompt(9), sampling=endless(40), top_logprobs=0)
            bench.run()
            assert bench.channel.finished[request].kind == "error"
            told.append((bench.channel.streams.get(request, []), bench.channel.logprobs.get(request, [])))
        assert told[0] == told[1], f"bad logits behind token {bad}"


def test_the_cost_model_does_not_count_drafts_as_prompts() -> None:
    """With `target_itl_ms`: a step without prompts counts as one, whatever its drafts."""
    bench = drafting(max_samples=8, options={"target_itl_ms": 50.0})
    bench.add(prompt(2), sampling=endless(60))
    bench.add(prompt(2, 4), sampling=endless(60, 6))
    bench.run()
    budget = bench.scheduler.budget
    assert isinstance(budget, TimedChunk)
    assert budget.times.longest_chunks <= 4, "no step had more tokens of prompts"


def test_steps_with_drafts_meet_the_target() -> None:
    """A step takes 1 ms and 1 ms for each token; a prompt gets what the drafts leave of 40 ms."""
    now = [0.0]
    bench = drafting(
        max_samples=5, budget=600, chunk=512, context=600, pages=600, options={"target_itl_ms": 40.0}, scribble=False
    )
    scheduler = Scheduler(bench.runner, (0,), bench.config, bench.channel, clock=lambda: now[0])
    bench.runner.namespace_of = lambda row: scheduler.rows.at(row).namespace
    bench.scheduler = scheduler
    done = [0.0]
    took: list[float] = []
    launch = bench.runner.launch

    def timed(plan: StepPlan) -> object:
        handle = launch(plan)
        seconds = 1e-3 * (1 + plan.num_tokens)
        done[0] = max(done[0], now[0]) + seconds
        took.append(seconds)
        end = done[0]

        class Handle:
            def result(self) -> object:
                now[0] = max(now[0], end)
                return handle.result()

        return Handle()

    bench.runner.launch = timed  # type: ignore[assignment, method-assign]
    for row in range(3):
        bench.add(prompt(3, row), sampling=endless(500, row))
    for _ in range(60):
        scheduler.step()
    bench.add(prompt(560, 9), sampling=endless(1))
    first = len(took)
    while len(scheduler.queue) or scheduler.rows.prefilling:
        scheduler.step()
    assert max(took[first + 8 :]) <= 1.1 * 40e-3, [round(1e3 * seconds) for seconds in took[first:]]


def test_drafts_take_no_tokens_of_the_step_that_a_prompt_needs() -> None:
    """As docs/architecture.md says."""
    first_chunks = []
    for max_samples in (1, 4):
        bench = drafting(max_samples=max_samples, rows=8, budget=24, chunk=16, pages=400)
        for row in range(7):
            bench.add(prompt(3, row), sampling=endless(100, row))
        while bench.scheduler.num_running < 7 or bench.scheduler.rows.prefilling:
            bench.scheduler.step()
        bench.add(prompt(100, 9), sampling=endless(1))
        bench.scheduler.step()
        plan = bench.runner.plans[-1]
        first_chunks.append(int(np.count_nonzero(plan.tokens >= 0)))
    assert first_chunks[1] == first_chunks[0]


def test_drafts_evict_no_prefix() -> None:
    """As docs/architecture.md says: drafts only take pages that no other request needs."""
    stop = Oracle(VOCAB).output(prompt(9, 7), 5, 12)[-1]
    evicted = []
    for max_samples in (1, 8):
        bench = drafting(max_samples=max_samples, page_size=1, pages=42, context=60, rows=2)
        bench.add(prompt(20, 1), sampling=endless(1))
        bench.run()
        bench.add(prompt(9, 7), sampling=endless(40, stop_token_ids=(stop,)))
        bench.run()
        bench.check_outputs()
        evicted.append(bench.scheduler.cache.num_evicted)
    assert evicted[1] == evicted[0] == 0


def test_no_request_is_retracted_while_drafts_hold_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    retract = Scheduler.retract_newest

    def noting(self: Scheduler, rank: int | None = None) -> bool:
        lengths = self.cache.lengths
        held.append(int((lengths.kv_allocated - lengths.kv_planned).sum()))
        return retract(self, rank)

    monkeypatch.setattr(Scheduler, "retract_newest", noting)
    for pages in range(48, 60):
        options = {"schedule_conservativeness": 0.01}
        bench = drafting(max_samples=8, page_size=1, pages=pages, context=60, rows=3, options=options)
        for row in range(3):
            bench.add(prompt(8, row), sampling=endless(40, row))
        bench.run()
        bench.check_outputs()
    assert held, "nobody was retracted: the test meets nothing"
    assert not any(held), f"{held} pages held in vain at retractions"


def test_lengths_on_the_device_are_absent_without_drafts() -> None:
    bench = drafting()
    bench.add(prompt(40), sampling=endless(9))
    bench.run()
    assert [
        plan.step
        for plan in bench.runner.plans
        if plan.length_on_device is not None and not plan.length_on_device.any()
    ] == []


def test_a_runner_without_drafts_refuses_drafts() -> None:
    one = np.ones(1, np.int32)
    plan = StepPlan(
        step=0,
        rows=np.zeros(1, np.int32),
        num_decode=0,
        query_lens=2 * one,
        kv_lens=9 * one,
        tokens=np.array([LAST_TOKEN, DRAFT], np.int32),
        samples=np.ones(1, np.bool_),
        page_deltas=(PageDeltas(NOTHING, NOTHING, NOTHING),),
    )
    with pytest.raises(ValueError, match="step 0"):
        check_plan(plan, ONE_SAMPLE, states=False)
    check_plan(plan, replace(ONE_SAMPLE, max_samples=2), states=False)


def test_a_runner_without_states_refuses_copies() -> None:
    one = np.ones(1, np.int32)
    plan = StepPlan(
        step=3,
        rows=np.zeros(1, np.int32),
        num_decode=1,
        query_lens=one,
        kv_lens=9 * one,
        tokens=np.array([LAST_TOKEN], np.int32),
        samples=np.ones(1, np.bool_),
        page_deltas=(PageDeltas(NOTHING, NOTHING, NOTHING),),
        copies=(SlotCopies(1, one, 2 * one),),
    )
    with pytest.raises(ValueError, match="step 3 copies states"):
        check_plan(plan, ONE_SAMPLE, states=False)


def test_slots_outside_the_pool_are_not_copied() -> None:
    one = np.ones(1, np.int32)
    nothing = PageDeltas(NOTHING, NOTHING, NOTHING)
    plan = StepPlan(
        step=3,
        rows=np.zeros(1, np.int32),
        num_decode=1,
        query_lens=one,
        kv_lens=9 * one,
        tokens=np.array([LAST_TOKEN], np.int32),
        samples=np.ones(1, np.bool_),
        page_deltas=(nothing, nothing),
        copies=(SlotCopies(1, one, 4 * one),),
    )
    pools = (PoolSpec("full", CacheKind.FULL, 9, 16), PoolSpec("mamba", CacheKind.STATE, 4, 16))
    spec = RunnerSpec(pools, max_rows=1, token_budget=1, max_context=32, vocab_size=9)
    with pytest.raises(ValueError, match=r"between slots \[1\] and \[4\]: pool mamba has slots 0 to 3"):
        check_plan(plan, spec, states=True)
    check_plan(replace(plan, copies=(SlotCopies(1, one, 3 * one),)), spec, states=True)


def test_the_fair_prefill_benchmark_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fair_prefill = importlib.import_module("fair_prefill")
    fair_prefill.run(512, None, 6.0, plain=False)


def test_each_row_with_drafts_gets_its_own_logprobs() -> None:
    told = []
    for max_samples in (1, 4):
        bench = drafting(max_samples=max_samples)
        requests = [bench.add(prompt(9, row), sampling=endless(20, row), top_logprobs=row) for row in range(4)]
        bench.run()
        told.append([bench.channel.logprobs[request] for request in requests])
    assert told[0] == told[1]
