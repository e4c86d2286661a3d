"""The composition of a step: decode rows, prefill chunks, the budget, and the overlap of steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import Bench

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.plan import LAST_TOKEN, StepPlan, StepResult
from sglang_jax.runner.protocol import StepHandle
from sglang_jax.sampling.params import SamplingParams


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def prompt(length: int, first: int = 1) -> list[int]:
    """Prompts with different first tokens share nothing."""
    return [first, *((3 * i + first) % 37 + 1 for i in range(length - 1))]


def shape(plan: StepPlan) -> tuple[int, list[int]]:
    """(decode rows, lengths of the prefill chunks)."""
    return plan.num_decode, plan.query_lens[plan.num_decode :].tolist()


def plans_of(bench: Bench) -> list[StepPlan]:
    bench.runner.keep_plans = True
    return bench.runner.plans


def test_decode_never_waits_for_a_long_prompt() -> None:
    """Regression: prefill-first scheduling froze every stream while a long prompt was computed."""
    bench = Bench(chunk=16, budget=32)
    first = bench.add(prompt(5), sampling=endless(40))
    bench.scheduler.step()
    plans = plans_of(bench)
    second = bench.add(prompt(100, first=2), sampling=endless(4))
    sampled = []
    while second not in bench.channel.streams:
        bench.scheduler.step()
        sampled.append(len(bench.channel.streams.get(first, [])))
    assert [shape(plan) for plan in plans[:7]] == [(1, [16])] * 6 + [(1, [4])]
    assert sampled == list(range(1, 9)), "the first request samples a token each step"
    bench.run()
    bench.check_outputs()


def test_a_chunk_samples_only_where_it_ends_its_prompt() -> None:
    bench = Bench(chunk=16)
    plans = plans_of(bench)
    bench.add(prompt(40), sampling=endless(2))
    bench.run()
    assert [(shape(plan), plan.samples.tolist()) for plan in plans] == [
        ((0, [16]), [False]),
        ((0, [16]), [False]),
        ((0, [8]), [True]),
        ((1, []), [True]),
    ]
    assert [plan.kv_lens.tolist() for plan in plans] == [[16], [32], [40], [41]]
    assert np.concatenate([plan.tokens for plan in plans]).tolist() == [*prompt(40), LAST_TOKEN]
    assert [len(plan.row_updates.sampling) for plan in plans] == [1, 0, 0, 0], "the runner is told once who has the row"


def test_several_prompts_share_a_step() -> None:
    """One chunk at a time leaves most of the budget unused when prompts are short."""
    bench = Bench(chunk=16, budget=32)
    plans = plans_of(bench)
    for k in range(1, 5):
        bench.add(prompt(5, first=k), sampling=endless(3))
    bench.run()
    assert [shape(plan) for plan in plans[:3]] == [(0, [5, 5, 5, 1]), (3, [4]), (4, [])]
    bench.check_outputs()


def test_an_unfinished_prompt_continues_in_steps_with_new_requests() -> None:
    bench = Bench(chunk=16, budget=32)
    plans = plans_of(bench)
    bench.add(prompt(20), sampling=endless(3))
    bench.add(prompt(6, first=2), sampling=endless(3))
    bench.add(prompt(30, first=3), sampling=endless(3))
    bench.run()
    assert [shape(plan) for plan in plans[:4]] == [(0, [10, 6]), (1, [10, 6]), (2, [16]), (1, [8])]
    bench.check_outputs()


def test_decode_rows_take_their_tokens_of_the_budget_first() -> None:
    bench = Bench(chunk=16, budget=10, rows=8)
    for k in range(1, 8):
        bench.add(prompt(2, first=k), sampling=endless(30))
    while bench.scheduler.num_running < 7 or len(bench.channel.streams) < 7:
        bench.scheduler.step()
    plans = plans_of(bench)
    bench.add(prompt(9, first=9), sampling=endless(3))
    for _ in range(4):
        bench.scheduler.step()
    assert [shape(plan) for plan in plans] == [(7, [3]), (7, [3]), (7, [3]), (8, [])]
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_output_does_not_depend_on_the_size_of_chunks_or_pages(chunk: int, page_size: int) -> None:
    bench = Bench(pages=256 // page_size, page_size=page_size, chunk=chunk, budget=64)
    for k in range(6):
        bench.add(prompt(7 + 9 * k, first=1 + k % 2), 12, seed=k)
    bench.run()
    assert all(finished.kind in ("stop", "length") for finished in bench.channel.finished.values())
    bench.check_outputs()


def test_a_fully_cached_prompt_still_runs_one_token() -> None:
    """A kernel with a query of length zero waits for a copy that never ends."""
    bench = Bench()
    bench.add(prompt(16), sampling=endless(3))
    bench.run()
    plans = plans_of(bench)
    again = bench.add(prompt(16), sampling=endless(3))
    bench.run()
    assert bench.channel.cached[again] == 12
    assert shape(plans[0]) == (0, [4])
    bench.check_outputs()


class SpiedHandle:
    def __init__(self, handle: StepHandle, plan: StepPlan, events: list[tuple[str, int]]) -> None:
        self._handle, self._plan, self._events = handle, plan, events
        self._copy = copy.deepcopy(plan)

    def result(self) -> StepResult:
        self._events.append(("result", self._plan.step))
        assert_same(self._plan, self._copy)
        return self._handle.result()


def assert_same(plan: StepPlan, copied: StepPlan) -> None:
    """Every array of the plan has the same content as at the launch."""
    for name in ("rows", "query_lens", "kv_lens", "tokens", "samples", "length_on_device"):
        assert np.array_equal(getattr(plan, name), getattr(copied, name)), name
    for deltas, before in zip(plan.page_deltas, copied.page_deltas, strict=True):
        for name in ("rows", "columns", "pages"):
            assert np.array_equal(getattr(deltas, name), getattr(before, name)), name
    for update, earlier in zip(plan.row_updates.sampling, copied.row_updates.sampling, strict=True):
        assert update.stop_ids.tolist() == earlier.stop_ids.tolist()
        assert (update.history is None) == (earlier.history is None)
        if update.history is not None:
            assert np.array_equal(update.history, earlier.history)
    for wanted, asked in zip(plan.prompt_logprobs, copied.prompt_logprobs, strict=True):
        assert wanted.targets.tolist() == asked.targets.tolist()


def spy_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Records launches and requests for results in order, and compares plans with their content at the launch."""
    events: list[tuple[str, int]] = []
    launch = bench.runner.launch

    def spied(plan: StepPlan) -> Any:
        events.append(("launch", plan.step))
        return SpiedHandle(launch(plan), plan, events)

    monkeypatch.setattr(bench.runner, "launch", spied)
    return events


def test_a_step_is_launched_before_the_previous_result_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device idles while the host works."""
    bench = Bench(chunk=8)
    events = spy_on(bench, monkeypatch)
    bench.add(prompt(20), sampling=endless(4))
    bench.run()
    expected = [("launch", 0)]
    for step in range(1, 6):
        expected += [("launch", step), ("result", step - 1)]
    assert events == [*expected, ("result", 5)]
    bench.check_outputs()


def test_at_most_two_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=10, options={"schedule_conservativeness": 0.01})
    events = spy_on(bench, monkeypatch)
    for k in range(1, 6):
        bench.add(prompt(9, first=k), sampling=endless(20))
    bench.run()
    assert bench.scheduler.log.counts.retractions > 0
    on_their_way = np.cumsum([1 if kind == "launch" else -1 for kind, _ in events])
    assert on_their_way.max() == 2
    assert [step for kind, step in events if kind == "result"] == list(range(len(events) // 2))


@pytest.mark.parametrize("lazy", [True, False])
def test_a_plan_is_never_changed_after_its_launch(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host arrays that a step in flight still read were a source of races for two years."""
    bench = Bench(pages=24, rows=4, chunk=8, lazy=lazy, options={"schedule_conservativeness": 0.01})
    events = spy_on(bench, monkeypatch)
    aborted = []
    for k in range(16):
        sampling = SamplingParams(max_new_tokens=6 + k, seed=k, repetition_penalty=1.1 + k % 2)
        request = bench.add(prompt(5 + 3 * k, first=1 + k % 3), sampling=sampling, logprob_start=k - 4, top_logprobs=2)
        if k % 5 == 4:
            aborted.append(request)
    for step in range(400):
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
        if step % 9 == 8 and aborted:
            bench.scheduler.abort(aborted.pop())
        if bench.scheduler.idle:
            break
    assert bench.scheduler.idle
    assert len(events) > 40
    bench.check_outputs()


def test_steady_decode_sends_only_changes_of_page_tables() -> None:
    """Regression: page tables rebuilt from all tokens at each step made the host slower than the device."""
    bench = Bench(pages=128, page_size=16, rows=8, chunk=64, budget=64, context=128)
    for k in range(1, 9):
        bench.add(prompt(7, first=k), sampling=endless(100))
    while len(bench.channel.streams) < 8:
        bench.scheduler.step()
    plans = plans_of(bench)
    before = bench.scheduler.cache.groups[0].pool.num_free
    for _ in range(64):
        bench.scheduler.step()
    sent = [len(plan.page_deltas[0].pages) for plan in plans]
    assert all(shape(plan) == (8, []) and not plan.row_updates.sampling for plan in plans)
    assert sum(sent) == before - bench.scheduler.cache.groups[0].pool.num_free == 8 * 4
    assert sum(count > 0 for count in sent) == 4, "rows of the same length cross into a new page together"
    rows = {id(plan.rows) for plan in plans}
    assert len(rows) == 1, "while nobody comes or goes the same array of rows is reused"


def test_many_short_requests_through_few_rows() -> None:
    """Regression: tokens of the step in flight, kept in a ring, were overwritten once enough requests ran."""
    bench = Bench(pages=40, rows=6, chunk=12, budget=24)
    for k in range(150):
        bench.add(prompt(1 + k % 11, first=1 + k % 5), 1 + k % 7, seed=k)
    bench.run()
    assert len(bench.channel.finished) == 150
    bench.check_outputs()
    assert bench.scheduler.cache.groups[0].pool.num_free + bench.scheduler.cache.groups[0].component.evictable == 40


def test_nothing_to_do_launches_nothing() -> None:
    bench = Bench()
    plans = plans_of(bench)
    for _ in range(5):
        bench.scheduler.step()
    assert not plans
    assert not bench.channel.messages
    assert bench.scheduler.idle


def test_a_single_token_request_takes_one_step() -> None:
    bench = Bench()
    plans = plans_of(bench)
    request = bench.add(prompt(6), sampling=endless(1))
    bench.run()
    assert len(plans) == 1
    assert bench.channel.finished[request].kind == "length"
    bench.check_outputs()
