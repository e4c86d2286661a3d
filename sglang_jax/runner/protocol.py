"""The interface that a backend implements for the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from sglang_jax.errors import ConfigError
from sglang_jax.runner.expert_load import ExpertLoad
from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult, TokenMasks
from sglang_jax.runner.pulse import Building


def cannot_reload(model_path: str) -> NoReturn:
    """For `Runner.load_weights` of a runner that was not created from a checkpoint."""
    raise ConfigError(f"the weights of this engine do not come from a checkpoint; got {model_path}")


class StepHandle(Protocol):
    """A launched step."""

    def sample(self, masks: TokenMasks) -> None:
        """Starts the second part of a step with masked sequences, without waiting for it. Call it once, before the next
        launch and before `result`, and only for such steps."""
        ...

    def result(self) -> StepResult:
        """Blocks until the step has run. Called once per handle, in the order of launching."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """A runner's properties, for `/server_info`, logs and benchmarks. `compiles_after_warm_up` counts programs built
    since warm-up because a step needed them: 0 in a healthy server. `programs_left` are still to be built in the
    background."""

    backend: str
    device: str
    compiled_programs: int
    compiles_after_warm_up: int
    weight_bytes: int
    kv_bytes: int
    details: dict[str, str]
    programs_left: int = 0


class Runner(Protocol):
    """Runs plans in the given order. At most two launched steps wait for their `result` call. A runner owns the device:
    weights, KV pages, the page-table copy, and each row's last token and sampling state. Padding, buckets, sharding and
    streams are internal to it."""

    @property
    def spec(self) -> RunnerSpec: ...

    def warm_up(self, progress: Callable[[int, int, str], None], *, first_only: bool = False) -> None:
        """Builds every program, and runs steps; calls `progress(done, total, what)` after each. With `first_only`, a
        runner whose programs take long to build returns once every step has one, and builds the others while it serves;
        until then steps run larger programs."""
        ...

    def announce_builds(self, building: Building) -> None:
        """From now on, enters `building` while a program is built, if that may take minutes."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step without waiting for it; with masked sequences, everything except the sampling."""
        ...

    def load_weights(self, model_path: str) -> None:
        """Replaces the model's weights by those of another checkpoint of the same architecture, after all launched
        steps; both are in memory meanwhile. KV stays as it is, and so does a draft model. Raises `CheckpointError` or
        `ConfigError` if that is not possible; the old weights are then still in place."""
        ...

    def start_profile(self, folder: str) -> None:
        """Starts a profile of this process and its devices, if none is recorded. Raises `ParameterError` for a folder
        that the backend cannot write to."""
        ...

    def stop_profile(self) -> None:
        """Ends the recording after all launched steps have run, and writes the profile; that may take seconds."""
        ...

    def report(self) -> RunnerReport: ...

    def expert_load(self) -> tuple[ExpertLoad, ...]:
        """The tokens of each layer with experts in all launched steps since warm-up, drafted ones included and padding
        not; waits until those steps have run. Empty unless `enable_expert_distribution_metrics`."""
        ...

    def close(self) -> None: ...
