"""The scheduler announces the requests that start before it launches the step that they start with."""

from __future__ import annotations

from typing import NoReturn

import pytest
from helpers.scheduling import Bench

from sglang_jax.runner.plan import StepPlan
from sglang_jax.scheduler.messages import StepOutputs


class BrokenDeviceError(Exception):
    """Raised by a device."""


def test_a_step_that_breaks_the_engine_has_been_announced() -> None:
    bench = Bench(rows=2)
    ids = [bench.add([1 + number] * 6, max_new_tokens=4) for number in range(4)]

    def launch(plan: StepPlan) -> NoReturn:
        raise BrokenDeviceError

    bench.runner.launch = launch
    with pytest.raises(BrokenDeviceError):
        bench.scheduler.step()
    assert set(bench.channel.cached) == set(ids[:2])


def test_each_start_is_announced_once_and_steps_without_starts_announce_nothing() -> None:
    bench = Bench(rows=2)
    for number in range(4):
        bench.add([1 + number] * 6, max_new_tokens=4)
    bench.run()
    announcements = [
        message
        for message in bench.channel.messages
        if isinstance(message, StepOutputs) and not (message.ids or message.finished)
    ]
    assert [len(message.started) for message in announcements] == [2, 2]
