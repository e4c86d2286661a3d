"""Beats of the processes that share a model: every few seconds, each reports how many steps it has launched. When a
step hangs, all ranks wait in the same collective; the rank that is behind the others, or has stopped reporting, is at
fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

BEAT_EVERY_SECONDS = 2.0

NoteBeat = Callable[[int, int], None]
"""Called on any thread with a rank and the number of steps that it has launched."""

_BEAT = re.compile(rb"alive(?: (\d{1,15}))?")


@dataclass(slots=True)
class Progress:
    """The steps that this rank has launched: written by the launching thread, read by the reporting one."""

    steps: int = 0

    def beat(self) -> bytes:
        return b"alive %d" % self.steps


def steps_in(data: bytes) -> int | None:
    """The steps in a beat, 0 if it has none; None for bytes that are not a beat."""
    found = _BEAT.fullmatch(data)
    return None if found is None else int(found[1] or 0)
