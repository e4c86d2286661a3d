"""Finds the compiler's threads by their processor time, and lowers the priority of threads."""

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
_MIN_TICKS = 300
"""Minimum ticks of a compiler thread, three seconds: other threads may have used less than that."""


def ticks_of_threads() -> dict[int, int]:
    """Processor time of each thread, by id, in the kernel's ticks (10 ms on most machines). Empty except on Linux."""
    found: dict[int, int] = {}
    for folder in _THREADS.iterdir() if _THREADS.is_dir() else ():
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # the thread has ended
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        found[int(folder.name)] = int(user) + int(system)
    return found


def compiler_threads(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """The compiler's threads, which it does not expose: the threads other than Python's that used the most processor
    time between two calls of `ticks_of_threads`, while little else than builds ran. Empty if they used too little, for
    example because programs came from a cache."""
    python = {thread.native_id for thread in threading.enumerate()}
    used = {thread: ticks - before.get(thread, 0) for thread, ticks in after.items() if thread not in python}
    most = max(used.values(), default=0)
    return [thread for thread, ticks in used.items() if most >= _MIN_TICKS and ticks >= _SHARE * most]


def lower_priority(thread: int) -> None:
    """Gives a thread, by id, a lower priority than all others of this process. Only Linux has priorities per thread."""
    try:
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(own + _NICENESS, 19))
    except OSError as error:
        logger.warning("Thread %d, which compiles in the background, keeps its priority: %s", thread, error)
