"""Rank 0 of several: the runner that the scheduler knows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sglang_jax.checkpoint import Checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult
from sglang_jax.runner.protocol import RunnerReport, StepHandle
from torch_backend.devices import select_device
from torch_backend.followers import Followers, WarmUp
from torch_backend.loading import load_rank
from torch_backend.process_group import join, leave
from torch_backend.runner import TorchRunner


def launch_group(config: EngineConfig, checkpoint: Checkpoint) -> GroupRunner:
    """A runner over `config.tp_size` devices, each with a process of its own; the first is this one.

    **Raises:** `ConfigError`, `CheckpointError` as for one device; `RuntimeError` if another process fails.
    """
    select_device(config.device, config.tp_size - 1)
    followers = Followers(config, logging.getLogger().getEffectiveLevel())
    try:
        followers.wait_ready()
        parallel = join(0, config.tp_size, followers.meeting_point, select_device(config.device))
        followers.on_loss(parallel.abort)
        runner = load_rank(config, checkpoint, parallel)
    except BaseException:
        followers.close()
        raise
    return GroupRunner(runner, followers)


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step on its way on every rank."""

    step: StepHandle
    followers: Followers

    def result(self) -> StepResult:
        """Raises `RuntimeError` if a rank was lost: what this rank computed without it means nothing."""
        try:
            result = self.step.result()
        finally:
            self.followers.check()
        return result


class GroupRunner:
    """`Runner` whose launches run on every rank."""

    def __init__(self, runner: TorchRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """See `Runner`."""
        self._followers.send(WarmUp())
        self._runner.warm_up(progress)

    def launch(self, plan: StepPlan) -> GroupStep:
        """See `Runner`. This rank launches first: it refuses what no rank may run."""
        step = self._runner.launch(plan)
        self._followers.send(plan)
        return GroupStep(step, self._followers)

    def report(self) -> RunnerReport:
        """This rank's."""
        return self._runner.report()

    def close(self) -> None:
        """Ends every rank."""
        self._runner.close()
        self._followers.close()
        leave()
