"""Requests in the background: they delay no other by more than a few steps, and end whatever others ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.scheduling import Bench
from helpers.simulation import Simulation, simulate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_jax.config import SchedulePolicy
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.admission import Admission, Decisions
from sglang_jax.scheduler.background import Background

ROWS = 8
AFTER = 8
"""Steps until all background rows are given back (1 + 2 + 4 + 1 rows), and those in flight."""


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)


def prompt(length: int, number: int) -> list[int]:
    """Prompts of different numbers share no page."""
    return [1 + number % 37, 1 + number // 37 % 37, *((3 * i + number) % 37 + 1 for i in range(length - 2))]


@dataclass(frozen=True)
class Crowd:
    """What is in the background, and the requests that come after `steps` steps. `pages`: of the pool, without which
    there is always room."""

    count: int = 20
    length: int = 20
    output: int = 400
    steps: int = 20
    others: int = ROWS
    others_length: int = 20
    pages: int = 4000
    tenants: int = 1
    policy: SchedulePolicy = SchedulePolicy.FCFS


def bench_of(policy: SchedulePolicy, pages: int = 4000) -> Bench:
    options = {"schedule_policy": policy}
    return Bench(pages=pages, rows=ROWS, chunk=64, budget=96, context=700, scribble=False, options=options)


def steps_to_first_tokens(crowd: Crowd, *, with_background: bool) -> int:
    """Steps until all the other requests have their first token."""
    bench = bench_of(crowd.policy, crowd.pages)
    for number in range(crowd.count * with_background):
        text = prompt(crowd.length, number)
        bench.add(text, sampling=endless(crowd.output), background=True, tenant=f"{number % crowd.tenants}")
    for _ in range(crowd.steps):
        bench.scheduler.step()
    others = {
        bench.add(prompt(crowd.others_length, 500 + number), sampling=endless(4), tenant="others", flow=str(number))
        for number in range(crowd.others)
    }
    for steps in range(1, 2000):
        bench.scheduler.step()
        if others <= bench.channel.streams.keys():
            return steps
    raise AssertionError("they have none")


def check_crowd(crowd: Crowd) -> None:
    alone = steps_to_first_tokens(crowd, with_background=False)
    assert steps_to_first_tokens(crowd, with_background=True) <= alone + alone // 2 + AFTER


ROWS_TAKEN = Crowd()
PAGES_TAKEN = Crowd(length=200, pages=400, others=3, others_length=300)


@pytest.mark.parametrize("policy", SchedulePolicy)
@pytest.mark.parametrize("crowd", [ROWS_TAKEN, PAGES_TAKEN], ids=["rows", "pages"])
def test_others_hardly_wait(crowd: Crowd, policy: SchedulePolicy) -> None:
    check_crowd(Crowd(**{**crowd.__dict__, "policy": policy}))


@settings(max_examples=30, deadline=None)
@given(
    crowd=st.builds(
        Crowd,
        count=st.integers(1, 40),
        length=st.integers(2, 300),
        output=st.integers(1, 400),
        steps=st.integers(1, 40),
        others=st.integers(1, 2 * ROWS),
        others_length=st.integers(2, 300),
        pages=st.sampled_from([200, 400, 4000]),
        tenants=st.integers(1, 3),
        policy=st.sampled_from(SchedulePolicy),
    )
)
@example(ROWS_TAKEN)
def test_others_hardly_wait_whatever_is_in_the_background(crowd: Crowd) -> None:
    check_crowd(crowd)


def check_that_the_background_ends(policy: SchedulePolicy) -> None:
    """While others never stop waiting for rows, and leave too few pages for the longest."""
    bench = bench_of(policy, pages=200)
    bench.scheduler.background.turn = 4
    background = {
        bench.add(prompt(length, length), sampling=endless(20), background=True, tenant=f"{length % 2}")
        for length in (100, 101, 600)
    }
    for step in range(1500):
        while len(bench.scheduler.queue) < 4:
            bench.add(prompt(60 + step % 7, 500 + step), sampling=endless(30), priority=5)
        bench.scheduler.step()
        if background <= bench.channel.finished.keys():
            bench.check_outputs()
            return
    raise AssertionError(f"{len(background - bench.channel.finished.keys())} have not ended")


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_the_background_ends_whatever_others_ask_for(policy: SchedulePolicy) -> None:
    check_that_the_background_ends(policy)


def check_order() -> None:
    """Without a turn, the background gets no row while others wait."""
    bench = bench_of(SchedulePolicy.FCFS)
    first = bench.add(prompt(20, 0), sampling=endless(2), background=True)
    others = [bench.add(prompt(20, 1 + number), sampling=endless(2)) for number in range(3 * ROWS)]
    bench.run()
    assert list(bench.channel.finished)[-1] == first
    assert sorted(bench.channel.finished) == sorted([first, *others])


def test_the_background_is_behind_all_others() -> None:
    check_order()


def test_the_background_may_use_half_of_the_queue() -> None:
    bench = Bench(options={"max_queued_requests": 5})
    refused = [bench.add([1], background=True) for _ in range(5)][3:]
    admitted = [bench.add([1]) for _ in range(2)]
    bench.run()
    errors = {one: done.error.name for one, done in bench.channel.finished.items() if done.error is not None}
    assert errors == dict.fromkeys(refused, "QueueFullError")
    assert not set(admitted) & set(errors)


class BackgroundSimulation(Simulation):
    """With requests in the background, and turns that come often."""

    def start(self, **sizes: object) -> None:
        super().start(**sizes)  # type: ignore[arg-type]
        background = self.bench.scheduler.background
        background.turn = 3
        seat = background._own._seat

        def seat_and_count(*arguments: object) -> None:
            self.watch._seats += 1  # others wait a step for a turn
            seat(*arguments)  # type: ignore[arg-type]

        background._own._seat = seat_and_count  # type: ignore[method-assign]

    @rule(count=st.integers(1, 4), length=st.integers(1, 20), new_tokens=st.sampled_from([1, 6, 30]))
    def add_to_the_background(self, count: int, length: int, new_tokens: int) -> None:
        for number in range(count):
            text = [1 + (number + position) % 30 for position in range(length)]
            self.live.append(self.bench.add(text, new_tokens, background=True, tenant="a", flow="batches"))


def never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "must_give_back", lambda self: False)


def blind_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission reports only pages that are short."""
    admit = Admission.admit

    def admit_and_forget(self: Admission, *arguments: int, **named: int) -> Decisions:
        decisions = admit(self, *arguments, **named)
        self.short = self.short and self._cache.num_free_rows > 0
        return decisions

    monkeypatch.setattr(Admission, "admit", admit_and_forget)


def never_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "_has_turn", lambda self, step: False)


def room_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "turn_steps", 10**9)


def taken_back_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "_retractable", Background._running)


def admitted_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "_has_turn", lambda self, step: bool(self._own.queue))


@pytest.mark.parametrize(
    ("plant", "run"),
    [
        (never_given_back, lambda: check_crowd(ROWS_TAKEN)),
        (never_given_back, lambda: check_crowd(PAGES_TAKEN)),
        (blind_to_rows, lambda: check_crowd(ROWS_TAKEN)),
        (never_in_turn, lambda: check_that_the_background_ends(SchedulePolicy.FCFS)),
        (room_is_not_kept, lambda: check_that_the_background_ends(SchedulePolicy.FCFS)),
        (taken_back_in_turn, lambda: check_that_the_background_ends(SchedulePolicy.FCFS)),
        (admitted_with_others, check_order),
    ],
)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()


def test_schedules_with_a_background() -> None:
    simulate(40, kind=BackgroundSimulation)
