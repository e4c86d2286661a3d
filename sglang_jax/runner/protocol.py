"""What the scheduler asks of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_jax.runner.plan import RunnerSpec, StepPlan, StepResult, TokenMasks
from sglang_jax.runner.pulse import Building


class StepHandle(Protocol):
    """A step that was launched."""

    def sample(self, masks: TokenMasks) -> None:
        """Starts the second part of a step with masked sequences, and returns without waiting for it. To be called
        once, before the next launch and before `result`; not for other steps."""
        ...

    def result(self) -> StepResult:
        """Blocks until the step has run; callable once. Handles are asked in the order of launching."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """What a runner can tell of itself: for `/server_info`, logs and benchmarks.

    `compiles_after_warm_up` counts programs built since warm-up ended: 0 in a healthy server.
    """

    backend: str
    device: str
    compiled_programs: int
    compiles_after_warm_up: int
    weight_bytes: int
    kv_bytes: int
    details: dict[str, str]


class Runner(Protocol):
    """Runs plans in the order given. At most two steps are launched and not yet asked for their result.

    A runner owns the device: weights, KV pages, the page-table copy, the last token of each row, and the
    sampling state of each row. Padding, buckets, sharding and streams are its own business.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """Builds every program, and runs steps; `progress(done, total, what)` is called as they are done."""
        ...

    def announce_builds(self, building: Building) -> None:
        """Has `building` entered around every program that is built from now on, if that may take minutes."""
        ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step and returns without waiting for it; of one with masked sequences all but the sampling."""
        ...

    def start_profile(self, folder: str) -> None:
        """Records what this process and its devices do from now on. To be called while no profile is taken.

        **Raises:** `ParameterError` for a folder that the backend cannot write to.
        """
        ...

    def stop_profile(self) -> None:
        """Ends the recording once all that was launched has run, and writes it; that may take seconds."""
        ...

    def report(self) -> RunnerReport: ...

    def close(self) -> None: ...
