"""Threads of this process by the processor time that they used, and a lower priority for those that compile."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_NICENESS = 10
_SHARE = 0.25
_LEAST_TICKS = 300
"""Three seconds: less has compiled little, and other threads may have done as much beside it."""


def ticks_of_threads() -> dict[int, int]:
    """Processor time that each thread has used, by its number, in the kernel's ticks (of 10 ms on most machines). Empty
    where the system does not tell, as any but Linux."""
    found: dict[int, int] = {}
    for folder in _THREADS.iterdir() if _THREADS.is_dir() else ():
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        found[int(folder.name)] = int(user) + int(system)
    return found


def compiler_threads(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """The compiler's own threads, of which it tells nothing: those that worked most between two calls of
    `ticks_of_threads`, while programs were built and little else was done. None of them is Python's. Empty where too
    little was done to tell, as with programs that were read from a cache."""
    python = {thread.native_id for thread in threading.enumerate()}
    used = {thread: ticks - before.get(thread, 0) for thread, ticks in after.items() if thread not in python}
    most = max(used.values(), default=0)
    return [thread for thread, ticks in used.items() if most >= _LEAST_TICKS and ticks >= _SHARE * most]


def lower_priority(thread: int) -> None:
    """Has all other threads of this process go before one of them, by its number. Linux alone gives threads priorities
    of their own."""
    try:
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(own + _NICENESS, 19))
    except OSError as error:
        logger.warning("Thread %d, which compiles in the background, keeps its priority: %s", thread, error)
