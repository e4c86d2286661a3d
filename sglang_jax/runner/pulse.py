"""The progress of a process that computes, for a watchdog in another process: a few numbers in shared memory. A process
that hangs (in a collective, in a driver, or stopped by a signal) cannot fail to send a message: its numbers just stay
the same."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray
from typing import Any

Building = Callable[[], AbstractContextManager[None]]
"""A context to enter while a program is built, which may take minutes without steps."""

MAX_RANKS = 256
"""Maximum ranks after the first whose beats a pulse stores."""

_STEPS, _TICKS, _BUSY, _BUILDING, _AT = range(5)
_OWN, _OF_RANK = 5, 3  # numbers of this process; of each further rank: steps, when they grew, when it last reported
_SIZE = _OWN + _OF_RANK * MAX_RANKS

Words = Any
"""The shared memory, int64 `[_SIZE]`: ctypes has no type for a shared array."""


def shared_words() -> Words:
    """Memory for a pulse, to pass to a spawned process as an argument."""
    words: Words = get_context("spawn").RawArray(ctypes.c_int64, _SIZE)
    return words


@dataclass(frozen=True, slots=True)
class Beat:
    """A reading of the numbers. `ticks`: grows with every step, and with every change between idle and busy; `busy`:
    the process has work, or reads messages that may be work; `building`: it builds a program; `at`: when `ticks` last
    grew, by `time.monotonic()`."""

    steps: int
    ticks: int
    busy: bool
    building: bool
    at: float


@dataclass(frozen=True, slots=True)
class RankBeat:
    """The last report of another rank: `steps` that it has launched, when they last grew (`at`), and when it last
    reported (`heard`), by `time.monotonic()`."""

    rank: int
    steps: int
    at: float
    heard: float


class Pulse:
    """Any thread of the process that computes writes it; any process may read it. `words`: of `shared_words`, None
    within one process."""

    def __init__(self, words: Words | None = None) -> None:
        self._words = RawArray(ctypes.c_int64, _SIZE) if words is None else words
        self._lock = threading.Lock()

    def note(self, *, steps: int, busy: bool) -> None:
        """Notes the number of steps so far, and whether there is work."""
        words = self._words
        if steps != words[_STEPS] or busy != words[_BUSY]:
            with self._lock:
                words[_STEPS], words[_BUSY] = steps, busy
                self._tick()

    def note_rank(self, rank: int, steps: int) -> None:
        """Notes the steps that rank 1 or higher has launched. Ignores ranks beyond `MAX_RANKS`."""
        if not 1 <= rank <= MAX_RANKS:
            return
        words, place, now = self._words, _OWN + _OF_RANK * (rank - 1), time.monotonic_ns()
        if steps != words[place] or not words[place + 2]:
            words[place], words[place + 1] = steps, now
        words[place + 2] = now

    def ranks(self) -> list[RankBeat]:
        """The ranks that have reported."""
        places = enumerate(range(_OWN, _SIZE, _OF_RANK), 1)
        found = [(rank, self._words[place : place + _OF_RANK]) for rank, place in places]
        return [RankBeat(rank, steps, at / 1e9, heard / 1e9) for rank, (steps, at, heard) in found if heard]

    @contextmanager
    def building(self) -> Iterator[None]:
        """See `Building`. Several threads may build at once."""
        with self._lock:
            self._words[_BUILDING] += 1
        try:
            yield
        finally:
            with self._lock:
                self._words[_BUILDING] -= 1
                self._tick()

    def read(self) -> Beat:
        words = self._words
        return Beat(words[_STEPS], words[_TICKS], bool(words[_BUSY]), words[_BUILDING] > 0, words[_AT] / 1e9)

    def _tick(self) -> None:
        self._words[_AT] = time.monotonic_ns()
        self._words[_TICKS] += 1
