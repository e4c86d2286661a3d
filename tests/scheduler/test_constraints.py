"""Requests with grammars in the scheduler: waiting for the compiler, masks in every situation, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import fake_grammars
from helpers.scheduling import Bench
from helpers.simulated_grammars import GrammarSimulation
from helpers.simulation import simulate
from hypothesis import strategies as st

from sglang_jax.runner.plan import TokenMasks
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.constraints import Constraints
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.planner import Planner
from sglang_jax.scheduler.request import Request, RequestState


def sampling(key: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "seed": 3, **fields}, grammar=fake_grammars.grammar(key))


def test_outputs_follow_their_grammars_in_batches_with_others() -> None:
    bench = Bench()
    for key in (1, 2, 3, 4, 6, 10):
        bench.add([1 + key, 2, 3], sampling=sampling(key, stop_token_ids=(5,)))
        bench.add([1 + key, 2], 9)
    bench.run()
    bench.check_outputs()
    assert all(finished.kind in ("stop", "length") for finished in bench.channel.finished.values())


def test_a_plain_step_stays_one_program() -> None:
    bench = Bench()
    bench.runner.keep_plans = True
    bench.add([1, 2, 3], 8)
    bench.run()
    assert all(plan.masked is None for plan in bench.runner.plans)
    bench.add([1, 2, 3], sampling=sampling(1, ignore_eos=True))
    bench.run()
    assert any(plan.masked is not None for plan in bench.runner.plans)


def test_a_request_that_waits_for_its_grammar_has_its_own_state_and_delays_no_other() -> None:
    bench = Bench()
    slow = bench.add([1, 2, 3], sampling=sampling(3))  # three looks
    assert bench.scheduler.requests[slow].state is RequestState.COMPILING
    assert (bench.scheduler.num_waiting, bench.scheduler.only_compiles, bench.scheduler.idle) == (1, True, False)
    other = bench.add([4, 5], 2)
    assert not bench.scheduler.only_compiles
    for _ in range(3):
        bench.scheduler.step()
    assert len(bench.channel.streams[other]) == 2
    assert slow not in bench.channel.streams
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_may_end_while_its_grammar_is_compiled(end: str) -> None:
    bench = Bench()
    request = bench.add([1, 2, 3], sampling=sampling(3))
    getattr(bench.scheduler, end)(request)
    bench.run()
    assert bench.scheduler.num_waiting == 0
    assert request not in bench.channel.streams


def test_a_grammar_that_cannot_be_compiled_ends_only_its_request() -> None:
    bench = Bench()
    bad = bench.add([1, 2], sampling=sampling(fake_grammars.REFUSED))
    good = bench.add([1, 2], 3)
    bench.run()
    error = bench.channel.finished[bad].error
    assert error is not None
    assert (error.name, error.param, error.message) == ("GrammarError", "regex", "regex: refused")
    assert bench.channel.finished[good].kind in ("stop", "length")


def test_without_a_library_a_grammar_is_refused() -> None:
    bench = Bench()
    bench.scheduler.constraints._compiler = None
    request = bench.add([1, 2], sampling=sampling(1))
    bench.run()
    error = bench.channel.finished[request].error
    assert error is not None
    assert "--grammar-backend" in error.message


def test_the_matcher_follows_kept_output_through_retractions() -> None:
    for steps in range(2, 9):
        bench = Bench()
        for key in (1, 2, 4, 6):
            bench.add([key, 9, 9], sampling=sampling(key, max_new_tokens=20, ignore_eos=True))
        for _ in range(steps):
            bench.scheduler.step()
        bench.scheduler.drain_in_flight()
        while bench.scheduler.retract_newest():
            pass
        bench.run()
        bench.check_outputs()


def mask_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers learn the tokens of a step only after the next one has sampled."""
    follow = Constraints.follow
    told: dict[int, int] = {}

    def follow_late(self: Constraints, requests: list[Request], tokens: list[int]) -> Any:
        known = [(request, told[request.id]) for request in requests if request.id in told]
        told.update({request.id: token for request, token in zip(requests, tokens, strict=True)})
        return follow(self, *map(list, zip(*known, strict=True))) if known else []

    monkeypatch.setattr(Constraints, "follow", follow_late)


def mask_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Constraints.masks

    def roll(self: Constraints, requests: Any) -> Any:
        found, closed = masks(self, requests)
        return TokenMasks(np.roll(found.words, 1, axis=0)), closed

    monkeypatch.setattr(Constraints, "masks", roll)


def restart_the_matcher_after_a_retraction(monkeypatch: pytest.MonkeyPatch) -> None:
    back = Finisher.requeue

    def forget(self: Finisher, request: Request) -> None:
        back(self, request)
        if request.matcher is not None:
            request.matcher.output.clear()  # type: ignore[attr-defined]

    monkeypatch.setattr(Finisher, "requeue", forget)


def follow_what_was_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher advances a token past the output that a retracted request keeps."""
    back = Finisher.requeue

    def go_on(self: Finisher, request: Request) -> None:
        back(self, request)
        if request.matcher is not None and request.prefill_len > request.prompt_len:
            request.matcher.output.append(1)  # type: ignore[attr-defined]

    monkeypatch.setattr(Finisher, "requeue", go_on)


def draft_under_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner._extend_with_drafts

    def forget(self: Planner, *arguments: Any) -> Any:
        kept, self._rows.one_by_one = self._rows.one_by_one, np.zeros_like(self._rows.one_by_one)
        try:
            return plan(self, *arguments)
        finally:
            self._rows.one_by_one = kept

    monkeypatch.setattr(Planner, "_extend_with_drafts", forget)


def end_by_min_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constraints, "_mask_end_tokens", lambda self, request, words: None)


FAULTS = (mask_a_token_late, mask_of_another_row, draft_under_masks, end_by_min_tokens_only)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_notices(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    fault(monkeypatch)
    sizes = {"drafts": st.just(4)} if fault is draft_under_masks else {}
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        simulate(1000, known_fault=True, sizes=sizes, kind=GrammarSimulation)


@pytest.mark.parametrize("fault", [restart_the_matcher_after_a_retraction, follow_what_was_not_kept])
def test_a_matcher_that_does_not_follow_kept_output_shows(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_matcher_follows_kept_output_through_retractions()


def test_the_runner_gets_masks_and_no_grammars() -> None:
    bench = Bench()
    bench.runner.keep_plans = True
    bench.add([1, 2, 3], sampling=sampling(1, min_new_tokens=4))
    bench.run()
    (update,) = bench.runner.plans[0].row_updates.sampling
    assert update.sampling == replace(sampling(1), grammar=None)
