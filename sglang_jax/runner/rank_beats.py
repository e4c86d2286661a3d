"""Signs of life of the processes that share a model: every few seconds each says how many steps it has launched.

What they say ends in the pulse of rank 0's process, where whoever watches that one finds it: when a step hangs, all
ranks wait in the same collective, and the one that is behind the others, or says nothing any more, is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

BEAT_EVERY_SECONDS = 2.0

NoteBeat = Callable[[int, int], None]
"""Called with a rank and how many steps it has launched, on any thread."""

_BEAT = re.compile(rb"alive(?: (\d{1,15}))?")


@dataclass(slots=True)
class Progress:
    """How many steps this rank has launched. Written by the thread that launches, read by the one that tells."""

    steps: int = 0

    def beat(self) -> bytes:
        """What the rank says."""
        return b"alive %d" % self.steps


def steps_in(data: bytes) -> int | None:
    """The steps that a beat tells, 0 if it tells none; None for what is no beat."""
    found = _BEAT.fullmatch(data)
    return None if found is None else int(found[1] or 0)
