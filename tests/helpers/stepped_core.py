"""An echo core whose steps a test allows one by one, so that its outputs do not depend on the machine's load."""

from __future__ import annotations

import threading
from collections.abc import Callable

from helpers.engine_fakes import EchoCore

from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel


class Steps:
    """How many steps a core may take: one, and those allowed since."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(1)

    def allow(self, count: int = 1) -> None:
        self.permits.release(count)


class SteppedCore(EchoCore):
    """Takes no step before `expected` requests are there at the same time, and then the allowed number."""

    def __init__(self, config: EngineConfig, channel: CoreChannel, steps: Steps, expected: int) -> None:
        super().__init__(config, channel)
        self._steps = steps
        self._expected = expected

    def _step(self) -> None:
        if self._peak >= self._expected and self._steps.permits.acquire(timeout=0.005):
            super()._step()


def load_stepped(steps: Steps, expected: int = 1) -> Callable[[EngineConfig, CoreChannel], SteppedCore]:
    """The `CoreLoader` of such a core in this process."""
    return lambda config, channel: SteppedCore(config, channel, steps, expected)
