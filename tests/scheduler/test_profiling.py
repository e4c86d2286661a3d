"""The start and end of a profile where the request cannot be met."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_jax.errors import ParameterError
from sglang_jax.runner.pulse import Pulse
from sglang_jax.scheduler.profiling import Profiling


class FullDisk:
    """A runner that can record a profile but not write it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start_profile(self, folder: str) -> None:
        self.calls.append("start")

    def stop_profile(self) -> None:
        self.calls.append("stop")
        raise OSError("no space left on device")


def test_a_failed_write_is_reported_and_another_profile_may_start(tmp_path: Path) -> None:
    runner = FullDisk()
    profiling = Profiling(runner, Pulse())  # type: ignore[arg-type]  # as far as it is used
    profiling.start(str(tmp_path), None, steps_done=0)
    with pytest.raises(ParameterError, match=r"not written to .*: no space left on device"):
        profiling.stop()
    profiling.start(str(tmp_path), 2, steps_done=5)
    profiling.after_step(6)
    assert runner.calls == ["start", "stop", "start"]
    profiling.after_step(7)  # no client waits for an answer: the error is logged, and the core continues
    assert runner.calls == ["start", "stop", "start", "stop"]
    with pytest.raises(ParameterError, match="no profile is being recorded"):
        profiling.stop()


@pytest.mark.parametrize("steps", [0, -1])
def test_a_profile_lasts_at_least_one_step(steps: int, tmp_path: Path) -> None:
    runner = FullDisk()
    with pytest.raises(ParameterError, match=f"num_steps must be at least 1, got {steps}"):
        Profiling(runner, Pulse()).start(str(tmp_path), steps, steps_done=0)  # type: ignore[arg-type]
    assert runner.calls == []
