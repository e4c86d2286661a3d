"""One model in several processes: rank 0 plans, the others follow. Every process runs the same plans in the same order
on its devices, and samples separately from the same logits, seeds and masks, so only plans and masks are sent between
hosts. Each backend chooses the transport of orders: a pipe to a child, or a connection to another node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_jax.errors import ConfigError
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult, TokenMasks
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.runner.pulse import Building
from sglang_jax.runner.rank_beats import NoteBeat, Progress
from sglang_jax.runner.wire import Codec

_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Runs the steps of a warm-up."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Starts a profile of the process and its devices, for `folder`."""

    folder: str


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Ends and writes the profile."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends the process in order."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Ends the process with an error at once, since rank 0 has failed."""

    reason: str


Order = WarmUp | StepPlan | TokenMasks | StartProfile | StopProfile | Leave
"""A message to a follower; it handles them in order."""

ORDERS: Codec[Order | GiveUp] = Codec(WarmUp, StepPlan, TokenMasks, StartProfile, StopProfile, Leave, GiveUp)
"""The codec of orders, and of `GiveUp`, which interrupts them."""


class Followers(Protocol):
    """The other processes of the group, as rank 0 sees them."""

    def send(self, order: Order) -> None:
        """Sends an order to every follower. Raises what `check` raises."""
        ...

    def announce(self, note: NoteBeat) -> None:
        """From now on, calls `note` with the progress that followers report."""
        ...

    def check(self) -> None:
        """Raises `RuntimeError` if a follower is lost, as steps need all of them."""
        ...

    def close(self) -> None:
        """Ends the followers, and waits for that."""
        ...


@dataclass(frozen=True, slots=True)
class GroupStep:
    step: StepHandle
    followers: Followers

    def sample(self, masks: TokenMasks) -> None:
        """As for a launch, this process is first."""
        self.step.sample(masks)
        self.followers.send(masks)

    def result(self) -> StepResult:
        """Raises `RuntimeError` if a process was lost, since the result is then invalid."""
        try:
            return self.step.result()
        finally:
            self.followers.check()


class GroupRunner:
    """The `Runner` of rank 0, which launches in every process. `runner`: of this process."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """Builds all programs, since every process has to run the same ones."""
        self._followers.send(WarmUp())
        self._runner.warm_up(progress)

    def announce_builds(self, building: Building) -> None:
        """The other processes build the same programs at the same time."""
        self._runner.announce_builds(building)

    def announce_ranks(self, note: NoteBeat) -> None:
        """Calls `note` with the beats of the other ranks."""
        self._followers.announce(note)

    def launch(self, plan: StepPlan) -> GroupStep:
        """This process launches first, since it refuses invalid plans."""
        step = self._runner.launch(plan)
        self._followers.send(plan)
        return GroupStep(step, self._followers)

    def load_weights(self, model_path: str) -> None:
        """Refuses: a process that fails to read its part would have other weights than the rest."""
        raise ConfigError("weights cannot be replaced in an engine of several processes; restart the server")

    def start_profile(self, folder: str) -> None:
        self._runner.start_profile(folder)
        self._followers.send(StartProfile(folder))

    def stop_profile(self) -> None:
        self._followers.send(StopProfile())
        self._runner.stop_profile()

    def report(self) -> RunnerReport:
        return self._runner.report()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """The counts of this process, which are those of all."""
        return self._runner.expert_load()

    def close(self) -> None:
        """Closes the runners of all processes, the others also if closing this one fails."""
        try:
            self._runner.close()
        finally:
            self._followers.close()


def follow(runner: Runner, next_order: Callable[[], Order], progress: Progress) -> None:
    """Handles the orders of rank 0 until `Leave`, with at most as many steps in flight as rank 0 has. Counts its steps
    in `progress`."""
    in_flight: deque[StepHandle] = deque()
    while True:
        match next_order():
            case StepPlan() as plan:
                in_flight.append(runner.launch(plan))
                progress.steps += 1
                if len(in_flight) > _STEPS_IN_FLIGHT:
                    in_flight.popleft().result()
            case TokenMasks() as masks:
                in_flight[-1].sample(masks)
            case WarmUp():
                runner.warm_up(_no_progress)
            case StartProfile(folder):
                runner.start_profile(folder)
            case StopProfile():
                runner.stop_profile()
            case Leave():
                for step in in_flight:
                    step.result()
                runner.close()
                return


def _no_progress(done: int, total: int, what: str) -> None:
    """Ignores the progress, which rank 0 shows."""
