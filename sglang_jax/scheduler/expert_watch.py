"""How evenly tokens choose experts, over the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from sglang_jax.runner.expert_load import ExpertLoad, load_since
from sglang_jax.scheduler.messages import ExpertBalance

SECONDS_BETWEEN_READS = 5.0
"""Minimum time between readings of a busy runner, as each waits for the steps in flight."""

WINDOW_SECONDS = 60.0
"""Balancedness covers at least this time, and at most one more period between readings."""


class ExpertWatch:
    """Reads a runner's counts of tokens per expert from time to time. `enabled`: whether the runner counts."""

    def __init__(
        self,
        read: Callable[[], tuple[ExpertLoad, ...]],
        *,
        enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_load = read
        self.enabled = enabled
        self._clock = clock
        self._steps = 0
        self._read_at = clock()
        self._readings = deque[tuple[float, tuple[ExpertLoad, ...]]]([(self._read_at, ())])
        self._found: list[ExpertBalance] = []

    def totals(self) -> dict[str, list[int]]:
        """Tokens that chose each expert since the start, by layer. Waits for the steps in flight."""
        return {str(one.layer): one.tokens.tolist() for one in self._read_load()}

    def balances(self, steps: int, *, idle: bool) -> list[ExpertBalance]:
        """The balance of each layer with experts, after `steps` steps: current if the scheduler is `idle`, otherwise at
        most `SECONDS_BETWEEN_READS` old."""
        now = self._clock()
        due = idle or now - self._read_at >= SECONDS_BETWEEN_READS
        if self.enabled and due and steps != self._steps:
            self._read_at, self._steps = now, steps
            self._read(now)
        return self._found

    def _read(self, now: float) -> None:
        load, readings = self._read_load(), self._readings
        while len(readings) > 1 and now - readings[1][0] >= WINDOW_SECONDS:
            readings.popleft()
        recent = load_since(readings[0][1], load)
        self._found = [
            ExpertBalance(all_time.layer, int(all_time.tokens.sum()), float(one.tokens.mean() / one.tokens.max()))
            for all_time, one in zip(load, recent, strict=True)
            if one.tokens.any()
        ]
        # An idle engine may be read after each step: readings in between are not kept.
        if len(readings) > 1 and now - readings[-2][0] < SECONDS_BETWEEN_READS:
            readings.pop()
        readings.append((now, load))
