"""One model in several processes: rank 0 plans, the others follow.

Every process runs the same plans in the same order on its own devices, and samples by itself from the same logits, the
same seeds and the same masks, so that nothing but plans and masks goes from process to process on the host. How orders
travel (a pipe to a child, a connection to another node) is each backend's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult, TokenMasks
from sglang_jax.runner.protocol import Runner, RunnerReport, StepHandle
from sglang_jax.runner.pulse import Building
from sglang_jax.runner.rank_beats import NoteBeat, Progress
from sglang_jax.runner.wire import Codec

_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the steps of a warm-up."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Record what this process and its devices do, for this folder."""

    folder: str


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Write the recording."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the group and end."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Rank 0 has failed: end with an error, whatever is waited for."""

    reason: str


Order = WarmUp | StepPlan | TokenMasks | StartProfile | StopProfile | Leave
"""What a follower is told, in this order."""

ORDERS: Codec[Order | GiveUp] = Codec(WarmUp, StepPlan, TokenMasks, StartProfile, StopProfile, Leave, GiveUp)
"""Orders as they go from process to process, and what breaks in on them."""


class Followers(Protocol):
    """The processes that do what rank 0 does, as rank 0 sees them."""

    def send(self, order: Order) -> None:
        """Has every follower do what this process does next. Raises what `check` raises."""
        ...

    def announce(self, note: NoteBeat) -> None:
        """Has `note` called with what followers say of their progress from now on."""
        ...

    def check(self) -> None:
        """Raises `RuntimeError` if a follower is lost: no step can be computed without it."""
        ...

    def close(self) -> None:
        """Ends the followers, and waits until they have."""
        ...


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step on its way in every process."""

    step: StepHandle
    followers: Followers

    def sample(self, masks: TokenMasks) -> None:
        """See `StepHandle`. As with a launch, this process goes first."""
        self.step.sample(masks)
        self.followers.send(masks)

    def result(self) -> StepResult:
        """Raises `RuntimeError` if a process was lost: what this one computed without it means nothing."""
        try:
            return self.step.result()
        finally:
            self.followers.check()


class GroupRunner:
    """`Runner` of rank 0, whose launches run in every process. `runner` is this process's part."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """See `Runner`; all is built, for every process has to run the same programs."""
        self._followers.send(WarmUp())
        self._runner.warm_up(progress)

    def announce_builds(self, building: Building) -> None:
        """See `Runner`. The others build what this process builds, at the same time."""
        self._runner.announce_builds(building)

    def announce_ranks(self, note: NoteBeat) -> None:
        """Has `note` called with the beats of the other ranks."""
        self._followers.announce(note)

    def launch(self, plan: StepPlan) -> GroupStep:
        """See `Runner`. This process launches first: it refuses what none may run."""
        step = self._runner.launch(plan)
        self._followers.send(plan)
        return GroupStep(step, self._followers)

    def start_profile(self, folder: str) -> None:
        """See `Runner`: every process records its own part."""
        self._runner.start_profile(folder)
        self._followers.send(StartProfile(folder))

    def stop_profile(self) -> None:
        """See `Runner`."""
        self._followers.send(StopProfile())
        self._runner.stop_profile()

    def report(self) -> RunnerReport:
        """This process's."""
        return self._runner.report()

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """This process's: all of them choose the same experts."""
        return self._runner.expert_load()

    def close(self) -> None:
        """Ends every process's part, the others' also where this one's fails."""
        try:
            self._runner.close()
        finally:
            self._followers.close()


def follow(runner: Runner, next_order: Callable[[], Order], progress: Progress) -> None:
    """Runs what rank 0 runs, in its order, until told to leave; not further ahead of the device than rank 0 is. Counts
    its steps in `progress`."""
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
    """Rank 0 shows it."""
