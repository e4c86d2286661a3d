"""The steps of `sessions.py`'s conversations without the engine around them: the model's share of a turn's time.

The scheduler runs in this process, without front end, wire or tokenizer, and its plans are recorded. A second runner
then executes the same plans back to back. Attention over all keys of the conversation is in both times, and grows in
both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.runner.pulse import Building
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import Inbound, NewRequest, Outbound, SessionTurn, StepOutputs
from sglang_jax.scheduler.scheduler import Scheduler

Inputs = list[list[list[int]]]
"""The tokens that each turn of each conversation adds."""


class NotingRunner:
    """A runner that keeps the plans it gets."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """As the wrapped runner."""
        self._runner.warm_up(progress)

    def announce_builds(self, building: Building) -> None:
        """As the wrapped runner."""
        self._runner.announce_builds(building)

    def launch(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def start_profile(self, folder: str) -> None:
        """As the wrapped runner."""
        self._runner.start_profile(folder)

    def stop_profile(self) -> None:
        """As the wrapped runner."""
        self._runner.stop_profile()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """As the wrapped runner."""
        return self._runner.expert_load()

    def report(self) -> RunnerReport:
        return self._runner.report()

    def close(self) -> None:
        self._runner.close()


class EndsChannel:
    """Records which requests have ended since the last read, and their output."""

    def __init__(self) -> None:
        self.ended: dict[int, list[int]] = {}

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        return iter(())

    def send(self, message: Outbound) -> None:
        if isinstance(message, StepOutputs):
            for finished in message.finished:
                assert finished.error is None, finished.error
                self.ended[finished.id] = np.frombuffer(finished.tokens, np.int32).tolist()


@dataclass(frozen=True, slots=True)
class Turns:
    """`[conversations, turns]` each: seconds with the scheduler; seconds of the same steps without it; and their
    number."""

    seconds: np.ndarray
    model_seconds: np.ndarray
    steps: np.ndarray


@dataclass
class _Talk:
    inputs: list[list[int]]
    history: list[int] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)


def measure_steps(
    config: EngineConfig,
    inputs: Inputs,
    sampling: SamplingParams,
    *,
    in_session: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Turns:
    """All conversations at once, each turn as soon as the one before it has ended; then their steps again. `clock`:
    `time.process_time` on a machine with other work, with one compute thread, as waiting threads take time too."""
    checkpoint = open_checkpoint(config.model_path, config.load_format, seed=config.random_seed)
    create, talks = load_backend(config), [_Talk(turns) for turns in inputs]
    runner = NotingRunner(_ready(create, config, checkpoint))
    try:
        _converse(runner, config, talks, sampling, in_session, clock)
    finally:
        runner.close()
    again = _ready(create, config, checkpoint)
    try:
        ends = np.array([0.0, *_run_again(again, runner.plans, clock)])
    finally:
        again.close()
    seconds, model, steps = [], [], []
    for talk in talks:
        pairs = list(zip(talk.begun, talk.ended, strict=True))
        seconds.append([end[0] - begin[0] for begin, end in pairs])
        model.append([ends[end[1]] - ends[begin[1]] for begin, end in pairs])
        steps.append([end[1] - begin[1] for begin, end in pairs])
    return Turns(np.array(seconds), np.array(model), np.array(steps))


def _ready(
    create: Callable[[EngineConfig, Checkpoint], Runner], config: EngineConfig, checkpoint: Checkpoint
) -> Runner:
    runner = create(config, checkpoint)
    runner.warm_up(lambda done, total, what: None)
    return runner


def _converse(
    runner: NotingRunner,
    config: EngineConfig,
    talks: list[_Talk],
    sampling: SamplingParams,
    in_session: bool,
    clock: Callable[[], float],
) -> None:
    channel = EndsChannel()
    scheduler = Scheduler(runner, (), config, channel)
    if in_session:
        for number in range(len(talks)):
            scheduler.sessions.open(OpenSession(str(number), "", True, None))

    def done() -> int:
        """The number of steps whose results are ready: a new turn waits for the one in flight."""
        return len(runner.plans) - scheduler.cache.in_flight

    def send(number: int) -> None:
        talk = talks[number]
        turn = len(talk.begun)
        new = talk.inputs[turn]
        tokens = new if in_session else [*talk.history, *new]
        talk.history += new
        talk.begun.append((clock(), done()))
        scheduler.add(
            NewRequest(
                id=turn * len(talks) + number + 1,
                token_ids=np.array(tokens, np.int32).tobytes(),
                sampling=sampling,
                session=SessionTurn(str(number), "", str(turn), None) if in_session else None,
            )
        )

    for number in range(len(talks)):
        send(number)
    while not scheduler.idle or channel.ended:
        scheduler.step()
        ended, channel.ended = channel.ended, {}
        for request_id, output in ended.items():
            number = (request_id - 1) % len(talks)
            talk = talks[number]
            talk.history += output
            talk.ended.append((clock(), done()))
            if len(talk.begun) < len(talk.inputs):
                send(number)


def _run_again(runner: Runner, plans: list[StepPlan], clock: Callable[[], float]) -> Iterator[float]:
    """Seconds from the start at which each step's result was ready; the next is launched before, as always."""
    start, before = clock(), None
    for plan in plans:
        handle = runner.launch(plan)
        if before is not None:
            before.result()
            yield clock() - start
        before = handle
    if before is not None:
        before.result()
        yield clock() - start
