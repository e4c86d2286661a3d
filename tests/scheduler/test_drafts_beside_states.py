"""Drafts with layers that keep states: rows leave the same states as without drafts, and none that took in a rejected
draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.scheduling import VOCAB, Bench
from helpers.simulation import STATE
from helpers.watch import Watch

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.plan import DRAFT, StepPlan, check_plan
from sglang_jax.sampling.params import SamplingParams

PAGE = 4


def prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + 3 * position) % (VOCAB - 2) for position in range(length)]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def bench(max_samples: int, track: int, *, slots: int = 24, **options: object) -> Bench:
    found = Bench(
        page_size=PAGE,
        more=((STATE, slots),),
        max_samples=max_samples,
        budget=64,
        options={"mamba_track_interval": track},
        **options,  # type: ignore[arg-type]
    )
    found.runner.keep_plans = True
    return found


def drafts_of(plan: StepPlan) -> int:
    return int(np.count_nonzero(plan.tokens == DRAFT))


@pytest.mark.parametrize("track", [0, PAGE, 16])
def test_drafts_change_only_the_number_of_steps(track: int) -> None:
    steps = []
    for max_samples in (1, 4):
        subject = bench(max_samples, track)
        for row in range(5):
            subject.add(prompt(9, row), sampling=endless(60, row))
        subject.run()
        subject.check_outputs()
        check_everything(subject.scheduler.cache)
        steps.append(len(subject.runner.plans))
    # At least a quarter of the steps wait at boundaries where pages are as short as drafts.
    assert steps[1] < (0.95 if track == PAGE else 0.8) * steps[0]


@pytest.mark.parametrize("length", range(20, 30))
def test_the_next_turn_resumes_from_the_last_boundary(length: int) -> None:
    """As it would without drafts."""
    cached = []
    for max_samples in (1, 6):
        subject = bench(max_samples, PAGE)
        first = subject.add(prompt(9), sampling=endless(length))
        subject.run()
        whole = [*prompt(9), *subject.channel.output(first)]
        second = subject.add([*whole, 7], sampling=endless(30, 6))
        subject.run()
        subject.check_outputs()
        cached.append(subject.channel.cached[second])
        assert subject.channel.cached[second] >= len(whole) - 1 - PAGE
    assert cached[0] == cached[1]


def test_no_step_crosses_a_boundary() -> None:
    subject = bench(6, PAGE)
    subject.add(prompt(9), sampling=endless(90))
    subject.run()
    decoding = [plan for plan in subject.runner.plans if plan.tokens.max() < 0]
    assert max(drafts_of(plan) for plan in decoding) == PAGE - 1
    for plan in decoding:
        end = int(plan.kv_lens[0])
        assert (end - 1) // PAGE == (end - int(plan.query_lens[0])) // PAGE
    assert any(plan.copies for plan in decoding), "states were kept"


def test_drafts_have_their_full_length_where_no_boundary_is_kept() -> None:
    subject = bench(6, 0)
    subject.add(prompt(9), sampling=endless(60))
    subject.run()
    assert [drafts_of(plan) for plan in subject.runner.plans[2:7]] == [5] * 5


@pytest.mark.parametrize("length", range(1, 9))
def test_a_row_at_a_boundary_leaves_the_last_slot_to_a_waiting_request(length: int) -> None:
    subject = bench(6, PAGE, rows=3, slots=2)
    watch = Watch(subject)
    for number, tokens in enumerate((60, length, 5)):
        subject.add(prompt(9, number), sampling=endless(tokens, number))
    for _ in range(60):
        watch.step()  # which checks that the third has a row as soon as there is a slot for it
    assert not subject.scheduler.queue
    subject.check_outputs()


def test_a_step_has_no_more_drafts_than_slots_for_their_states() -> None:
    subject = bench(6, 0, max_drafts=7)
    for row in range(3):
        subject.add(prompt(3, row), sampling=endless(60, row))
    subject.run()
    subject.check_outputs()
    most = max(subject.runner.plans, key=drafts_of)
    assert 3 <= drafts_of(most) <= 7
    spec = subject.runner.spec
    check_plan(most, spec, states=True)
    with pytest.raises(ValueError, match="drafts, but there are only 7 slots for their states"):
        check_plan(_with_tokens(most, [-1, *[DRAFT] * 8]), spec, states=True)
    with pytest.raises(ValueError, match="drafts alongside prompts"):
        check_plan(_with_tokens(most, [-1, DRAFT, 5]), spec, states=True)


def _with_tokens(plan: StepPlan, tokens: list[int]) -> StepPlan:
    return replace(plan, tokens=np.array(tokens, np.int32))
