"""How evenly tokens choose experts, of the last minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from sglang_jax.runner.expert_load import ExpertLoad, load_since
from sglang_jax.runner.protocol import Runner
from sglang_jax.scheduler.messages import ExpertBalance

SECONDS_BETWEEN_READS = 5.0
"""Of a busy runner, whose steps a reading waits for."""

WINDOW_SECONDS = 60.0
"""Balancedness is that of the tokens of so many seconds at least, and of twice as many at most."""


class ExpertWatch:
    """Reads a runner's counts from time to time. `enabled`: the runner counts; otherwise nothing is read."""

    def __init__(self, runner: Runner, *, enabled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self.enabled = enabled
        self._clock = clock
        self._steps = 0
        self._read_at = self._marked_at = clock()
        self._window_start: tuple[ExpertLoad, ...] = ()
        self._mark: tuple[ExpertLoad, ...] = ()
        self._found: list[ExpertBalance] = []

    def totals(self) -> dict[str, list[int]]:
        """How many tokens each expert was chosen by since the start, by layer; waits for the steps in flight."""
        return {str(one.layer): one.tokens.tolist() for one in self._runner.expert_load()}

    def balances(self, steps: int, *, idle: bool) -> list[ExpertBalance]:
        """One for each layer with experts, after so many `steps`: up to date if the scheduler is `idle`, otherwise
        `SECONDS_BETWEEN_READS` old at most."""
        now = self._clock()
        due = idle or now - self._read_at >= SECONDS_BETWEEN_READS
        if self.enabled and due and steps != self._steps:
            self._read_at, self._steps = now, steps
            self._read(now)
        return self._found

    def _read(self, now: float) -> None:
        load = self._runner.expert_load()
        recent = load_since(self._window_start, load)
        self._found = [
            ExpertBalance(all_time.layer, int(all_time.tokens.sum()), float(one.tokens.mean() / one.tokens.max()))
            for all_time, one in zip(load, recent, strict=True)
            if one.tokens.any()
        ]
        if now - self._marked_at >= WINDOW_SECONDS:
            self._window_start, self._mark, self._marked_at = self._mark, load, now
