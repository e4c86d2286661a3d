"""How long a higher priority may delay a waiting request: about `PRIORITY_TURN` times as long as without priorities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.scheduling import Bench
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_jax.config import SchedulePolicy
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import admission, planner
from sglang_jax.scheduler.chunking import PRIORITY_TURN

CHUNK = 64
AFTER = 2 * PRIORITY_TURN
"""Steps that ignore priorities or wait for one in flight, on top of the ratio."""


@dataclass(frozen=True)
class Crowd:
    """Long prompts of other clients: their length, how many wait at first and how many arrive in each step, and whether
    each arrival has a higher priority than all before it."""

    length: int = 300
    first: int = 40
    each_step: int = 0
    rising: bool = False
    policy: SchedulePolicy = SchedulePolicy.FCFS


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)


def prompt(length: int, number: int) -> list[int]:
    """Prompts of different numbers share no page."""
    return [1 + number % 37, 1 + number // 37 % 37, *((3 * i + number) % 37 + 1 for i in range(length - 2))]


def steps_of_a_short_one(crowd: Crowd, priority: int) -> int:
    """Steps until a short prompt has its first token, behind a crowd of this priority (or of this and higher ones)."""
    options = {"schedule_policy": crowd.policy}
    bench = Bench(pages=4000, rows=16, chunk=CHUNK, budget=96, context=700, scribble=False, options=options)
    count = 0

    def arrive(number: int) -> None:
        nonlocal count
        for _ in range(number):
            own = priority + count if priority and crowd.rising else priority
            bench.add(prompt(crowd.length, count), sampling=endless(1), priority=own)
            count += 1

    arrive(crowd.first)
    for _ in range(3):
        bench.scheduler.step()
    short = bench.add(prompt(20, 1200), sampling=endless(1))
    for steps in range(1, 1000):
        bench.scheduler.step()
        if short in bench.channel.streams:
            return steps
        arrive(crowd.each_step)
    raise AssertionError("it has none")


def check(crowd: Crowd) -> None:
    alike = steps_of_a_short_one(crowd, 0)
    assert steps_of_a_short_one(crowd, 1000) <= PRIORITY_TURN * alike + AFTER


def run_crowd() -> None:
    """Each has a higher priority than all before it; otherwise those with older rows end first anyway, by their own
    share."""
    check(Crowd(length=600, rising=True))


def run_endless_crowd() -> None:
    check(Crowd(first=10, each_step=1))


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_crowd_of_high_priority_delays_a_short_prompt_by_a_few_steps(policy: SchedulePolicy) -> None:
    """Regression: a prompt of 50 tokens waited 796 steps behind prompts of 2,000 with priority 1000, and 4 behind the
    same with priority 0."""
    check(Crowd(policy=policy))


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_an_endless_crowd_delays_a_short_prompt_by_a_few_steps(policy: SchedulePolicy) -> None:
    check(Crowd(first=10, each_step=1, policy=policy))


@settings(max_examples=25, deadline=None)
@given(
    crowd=st.builds(
        Crowd,
        length=st.integers(22, 600),
        first=st.integers(0, 40),
        each_step=st.integers(0, 2),
        rising=st.booleans(),
        policy=st.sampled_from(SchedulePolicy),
    )
)
@example(Crowd(length=600, rising=True, each_step=1))
def test_the_bound_holds_for_any_crowd(crowd: Crowd) -> None:
    check(crowd)


def test_priorities_count_in_all_other_steps() -> None:
    """The oldest prompt has its quarter, and a shorter one the rest of one step in `PRIORITY_TURN`."""
    bench = Bench(pages=400, rows=4, chunk=16, budget=32, context=700, scribble=False)
    bench.add(prompt(300, 1), sampling=endless(1))
    bench.add(prompt(200, 2), sampling=endless(1), priority=1)
    lower = bench.add(prompt(120, 3), sampling=endless(1))
    for _ in range(200 // 12 + 3):
        bench.scheduler.step()
    computed = bench.scheduler.requests[lower].record.kv_allocated_len
    assert 0 < computed <= 12 * 6
    bench.run()
    assert next(iter(bench.channel.finished)) == 2
    bench.check_outputs()


def always_by_priority_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "goes_by_priority", lambda step: True)


def always_by_priority_at_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "goes_by_priority", lambda step: True)


@pytest.mark.parametrize(
    ("plant", "run"),
    [
        (always_by_priority_in_chunks, run_crowd),
        (always_by_priority_at_admission, run_crowd),
        (always_by_priority_at_admission, run_endless_crowd),
    ],
)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()
