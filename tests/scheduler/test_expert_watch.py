"""When a runner's counts of experts are read, and which tokens balancedness covers."""

from __future__ import annotations

import numpy as np

from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.scheduler.expert_watch import SECONDS_BETWEEN_READS, WINDOW_SECONDS, ExpertWatch
from sglang_jax.scheduler.messages import ExpertBalance


class Counting:
    """A runner with experts, and a clock. `reads` counts the readings."""

    def __init__(self) -> None:
        self.tokens = np.zeros((2, 4), np.int64)
        self.now = 1000.0
        self.reads = 0

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        self.reads += 1
        return tuple(ExpertLoad(layer, self.tokens[layer // 3].copy()) for layer in (0, 3))


def watch(runner: Counting, *, enabled: bool = True) -> ExpertWatch:
    return ExpertWatch(runner.expert_load, enabled=enabled, clock=lambda: runner.now)


def test_a_busy_runner_is_read_every_few_seconds_and_an_idle_one_after_each_step() -> None:
    runner = Counting()
    watched = watch(runner)
    reads = []
    for seconds, steps, idle in [
        (0.0, 0, True),
        (0.1, 1, False),
        (SECONDS_BETWEEN_READS, 2, False),
        (0.1, 3, False),
        (0.1, 3, True),
        (0.1, 3, True),
        (2 * SECONDS_BETWEEN_READS, 3, True),
        (0.0, 4, True),
    ]:
        runner.now += seconds
        watched.balances(steps, idle=idle)
        reads.append(runner.reads)
    assert reads == [0, 0, 1, 1, 2, 2, 2, 3]


def test_balancedness_covers_the_last_minute_and_token_counts_cover_everything() -> None:
    runner = Counting()
    watched = watch(runner)
    runner.tokens += [[4, 4, 4, 4], [8, 0, 0, 8]]
    assert watched.balances(1, idle=True) == [ExpertBalance(0, 16, 1.0), ExpertBalance(3, 16, 0.5)]
    for step in range(2, 5):
        runner.now += WINDOW_SECONDS
        runner.tokens += [[4, 0, 0, 0], [0, 6, 6, 0]]
        found = watched.balances(step, idle=False)
    assert found == [ExpertBalance(0, 28, 0.25), ExpertBalance(3, 52, 0.5)]
    assert watched.totals() == {"0": [16, 4, 4, 4], "3": [8, 18, 18, 8]}


def test_readings_from_before_a_pause_do_not_count() -> None:
    """A busy minute, then a day without steps: the next tokens count by themselves, and readings do not pile up while
    an idle engine is read after each step."""
    runner = Counting()
    watched = watch(runner)
    for step in range(1, 60):
        runner.now += 2.0
        runner.tokens += [[8, 0, 0, 0], [8, 0, 0, 0]]
        assert {one.balancedness for one in watched.balances(step, idle=True)} == {0.25}
    runner.now += 24 * 3600
    assert {one.balancedness for one in watched.balances(59, idle=True)} == {0.25}  # the last minute with steps
    for step in range(60, 1000):
        runner.tokens += 1
        assert {one.balancedness for one in watched.balances(step, idle=True)} == {1.0}
        runner.now += 0.1
    assert len(watched._readings) < 2 * WINDOW_SECONDS / SECONDS_BETWEEN_READS + 3


def test_without_the_option_nothing_is_read() -> None:
    runner = Counting()
    assert watch(runner, enabled=False).balances(1, idle=True) == []
    assert runner.reads == 0


def test_a_layer_without_tokens_has_no_balancedness() -> None:
    runner = Counting()
    runner.tokens[1] = 1
    assert watch(runner).balances(1, idle=True) == [ExpertBalance(3, 4, 1.0)]
