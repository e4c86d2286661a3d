"""A scheduler over `FakeRunner` whose steps take time without using the host's CPU, like those of a device."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable

from helpers.engine_fakes import FAKE_EOS, FAKE_VOCAB_SIZE, MODEL_INFO, load_tokenizer

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel, Ready
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import launch_core, launch_link
from sglang_jax.engine.launch_replicated import launch_engines
from sglang_jax.engine.placement import Placement
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import PoolSpec, RunnerSpec, StepPlan, StepResult
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.runner.pulse import Building
from sglang_jax.scheduler.loop import SchedulerLoop

CONTEXT = 256


class SleepingHandle:
    """A step that is over at `end` (`time.monotonic()`)."""

    def __init__(self, handle: StepHandle, end: float) -> None:
        self._handle = handle
        self._end = end

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._end - time.monotonic()))
        return self._handle.result()


class SleepingRunner:
    """Runs steps one after the other, each for the same time. A step that has `trap` among its tokens never ends."""

    def __init__(self, inner: Runner, seconds: float, trap: Callable[[], None] | None = None) -> None:
        self._inner = inner
        self._seconds = seconds
        self._trap = trap
        self._end = 0.0

    @property
    def spec(self) -> RunnerSpec:
        return self._inner.spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        self._inner.warm_up(progress)

    def launch(self, plan: StepPlan) -> StepHandle:
        if self._trap is not None and TRAP in plan.tokens:
            self._trap()
        self._end = max(self._end, time.monotonic()) + self._seconds
        return SleepingHandle(self._inner.launch(plan), self._end)

    def announce_builds(self, building: Building) -> None:
        self._inner.announce_builds(building)

    def start_profile(self, folder: str) -> None:
        self._inner.start_profile(folder)

    def stop_profile(self) -> None:
        self._inner.stop_profile()

    def report(self) -> RunnerReport:
        return self._inner.report()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        return self._inner.expert_load()

    def close(self) -> None:
        self._inner.close()


def hang_in_python() -> None:
    """Lets other threads run."""
    while True:
        time.sleep(60)


def hang_in_native_code() -> None:
    """Blocks all other threads of the interpreter: the regular expression takes 2^60 steps."""
    re.match("(a+)+$", "a" * 60 + "b")


TRAP = 126
"""A prompt with this token makes a core with a trap hang."""

TRAPS = {"sleep": None, "hang": hang_in_python, "native": hang_in_native_code}


class SleepingCore:
    """`model_path` is `sleep:SECONDS` per step, or `hang:SECONDS` and `native:SECONDS` for a core with a trap; pool and
    rows as in the options. The model's architecture is the id of the core's process."""

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        pool = PoolSpec(
            "full", CacheKind.FULL, (config.max_total_tokens or 4096) // config.page_size + 1, config.page_size
        )
        spec = RunnerSpec((pool,), config.max_running_requests or 8, 256, CONTEXT, FAKE_VOCAB_SIZE)
        kind, _, seconds = config.model_path.partition(":")
        runner = SleepingRunner(FakeRunner(spec), float(seconds), TRAPS[kind])
        self._loop = SchedulerLoop(runner, (FAKE_EOS,), config, channel, channel.pulse)
        info = dataclasses.replace(
            MODEL_INFO,
            architecture=str(os.getpid()),
            context_length=CONTEXT,
            vocab_size=FAKE_VOCAB_SIZE,
            eos_token_ids=(FAKE_EOS,),
        )
        tokens = (pool.num_pages - 1) * pool.page_size
        self.ready = Ready(model_info=info, max_running_requests=spec.max_rows, max_total_tokens=tokens)

    def run(self) -> None:
        self._loop.run()

    def close(self) -> None:
        """There is nothing to close."""


def load_sleeping(config: EngineConfig, channel: CoreChannel) -> SleepingCore:
    return SleepingCore(config, channel)


async def launch_sleeping(config: EngineConfig, placement: Placement) -> AsyncEngineClient:
    """In a separate process, anywhere on the machine: its steps take no CPU."""
    return await launch_core(
        config,
        in_process=False,
        load=load_sleeping,
        load_tokenizer=load_tokenizer,
        placement=dataclasses.replace(placement, cores=()),
    )


async def launch_sleeping_engines(config: EngineConfig) -> AsyncEngineClient:
    """Launches its engines as a server does."""

    async def launch(options: EngineConfig, placement: Placement | None) -> CoreLink:
        return await launch_link(options, in_process=False, load=load_sleeping)

    return await launch_engines(config, launch=launch, load_tokenizer=load_tokenizer)


async def launch_sleeping_link(config: EngineConfig, placement: Placement) -> CoreLink:
    """As `launch_sleeping`, for an existing front end."""
    return await launch_link(
        config, in_process=False, load=load_sleeping, placement=dataclasses.replace(placement, cores=())
    )
