"""Detects a core that has work but makes no steps."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from sglang_jax.runner.pulse import Beat, Pulse, RankBeat

MAX_BETWEEN_LOOKS = 1.0
"""Maximum seconds between two looks at a pulse; a tenth of either timeout if that is less."""


class SilenceMeter:
    """Measures for how many seconds a core has had work and made no progress; time of building one program separately
    (`building`). Looks are `between` seconds apart. A longer gap counts as two intervals: if the machine was suspended,
    or this process was stopped or busy, the gap says nothing about the core."""

    def __init__(self, between: float) -> None:
        self.seconds = 0.0
        self.building = 0.0
        self._between = between
        self._ticks = -1

    def look(self, beat: Beat, *, waited_for: bool, passed: float) -> float:
        """Updates and returns the seconds, from a pulse read `passed` seconds after the last look. `waited_for`: a
        request or call waits for the core, whatever the core reports."""
        at_rest = not (beat.busy or waited_for)
        stands = beat.ticks == self._ticks and not at_rest
        more = min(passed, 2 * self._between)
        self.seconds = self.seconds + more if stands and not beat.building else 0.0
        self.building = self.building + more if stands and beat.building else 0.0
        self._ticks = beat.ticks
        return self.seconds


class Watchdog:
    """Looks at a pulse until a core with work has been silent for `timeout` seconds, or has built one program for
    `build_timeout` seconds, then calls `on_hang` once with a description. `waited_for`: see `SilenceMeter.look`."""

    def __init__(
        self,
        pulse: Pulse,
        timeout: float,
        waited_for: Callable[[], bool],
        on_hang: Callable[[str], None],
        build_timeout: float = math.inf,
    ) -> None:
        self._pulse = pulse
        self._timeout = timeout
        self._build_timeout = build_timeout
        self._between = min(MAX_BETWEEN_LOOKS, timeout / 10, build_timeout / 10)
        self._silence = SilenceMeter(self._between)
        self._waited_for = waited_for
        self._on_hang = on_hang
        self._task = asyncio.create_task(self._watch(), name="watchdog")

    @property
    def silent_seconds(self) -> float:
        return self._silence.seconds

    def stop(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(self._between)
            now = time.monotonic()
            beat = self._pulse.read()
            silent = self._silence.look(beat, waited_for=self._waited_for(), passed=now - looked)
            looked = now
            if silent >= self._timeout:
                self._on_hang(_describe(beat, self._pulse.ranks(), silent, now))
                return
            if self._silence.building >= self._build_timeout:
                self._on_hang(f"it has built a program for {self._silence.building:.0f} s while there was work to do")
                return


def _describe(beat: Beat, ranks: Sequence[RankBeat], silent: float, now: float) -> str:
    last = f"step {beat.steps} was launched {now - beat.at:.0f} s ago" if beat.steps else "it has made none yet"
    others = "".join(
        f"; rank {rank.rank} launched its step {rank.steps} {now - rank.at:.0f} s ago, and last reported "
        f"{now - rank.heard:.0f} s ago"
        for rank in ranks
    )
    return f"it has made no step for {silent:.0f} s while there was work to do ({last}{others})"
