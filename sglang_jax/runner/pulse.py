"""Signs of life: what a process that computes says of its progress, for whoever watches it from another one.

A few numbers in memory that both processes have. Nothing is sent, so there is nothing that a process which stands still
could fail to send or its watcher fail to read: whatever it stands in (a collective, a driver, a signal that stopped
it), its numbers stay as they are.
"""

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
"""What is entered while a program is built: that may take minutes in which no step is made."""

MOST_RANKS = 256
"""Ranks beside the first whose beats a pulse has room for."""

_STEPS, _TICKS, _BUSY, _BUILDING, _AT = range(5)
_OWN, _OF_RANK = 5, 3  # numbers of this process; numbers of each further rank: steps, when they grew, when it spoke
_SIZE = _OWN + _OF_RANK * MOST_RANKS

Words = Any
"""The shared memory, int64 `[_SIZE]`: ctypes has no type for an array that several processes have."""


def shared_words() -> Words:
    """Memory for a pulse, to be given to a spawned process as an argument."""
    words: Words = get_context("spawn").RawArray(ctypes.c_int64, _SIZE)
    return words


@dataclass(frozen=True, slots=True)
class Beat:
    """The numbers as somebody found them.

    - `ticks`: grows with every step, and with every change from idle to busy and back.
    - `busy`: it has work, or takes in what may be work. `building`: it builds a program.
    - `at`: when `ticks` last grew, in seconds of `time.monotonic()`.
    """

    steps: int
    ticks: int
    busy: bool
    building: bool
    at: float


@dataclass(frozen=True, slots=True)
class RankBeat:
    """What is known of another rank of the same model: `steps` that it has launched, when they last grew (`at`), and
    when it last said anything (`heard`), in seconds of `time.monotonic()`."""

    rank: int
    steps: int
    at: float
    heard: float


class Pulse:
    """Written by the process that computes, on any of its threads; read by any process.

    **Arguments:** `words`: of `shared_words`; None for a pulse that nobody else sees.
    """

    def __init__(self, words: Words | None = None) -> None:
        self._words = RawArray(ctypes.c_int64, _SIZE) if words is None else words
        self._lock = threading.Lock()

    def note(self, *, steps: int, busy: bool) -> None:
        """So many steps were made so far, and there is work, or there is none."""
        words = self._words
        if steps != words[_STEPS] or busy != words[_BUSY]:
            with self._lock:
                words[_STEPS], words[_BUSY] = steps, busy
                self._tick()

    def note_rank(self, rank: int, steps: int) -> None:
        """Rank 1 or higher says that it has launched so many steps. Ranks beyond `MOST_RANKS` are not noted."""
        if not 1 <= rank <= MOST_RANKS:
            return
        words, place, now = self._words, _OWN + _OF_RANK * (rank - 1), time.monotonic_ns()
        if steps != words[place] or not words[place + 2]:
            words[place], words[place + 1] = steps, now
        words[place + 2] = now

    def ranks(self) -> list[RankBeat]:
        """Those that have said something."""
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
        """What is known now."""
        words = self._words
        return Beat(words[_STEPS], words[_TICKS], bool(words[_BUSY]), words[_BUILDING] > 0, words[_AT] / 1e9)

    def _tick(self) -> None:
        self._words[_AT] = time.monotonic_ns()
        self._words[_TICKS] += 1
