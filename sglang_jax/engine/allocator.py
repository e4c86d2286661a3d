"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""

ARENAS = 2
MAPPED_BYTES = 131_072
TRIMMED_BYTES = 1_048_576

GROWTH_BYTES = 2**20
"""Growth in bytes after which a process releases free memory. A core allocates and frees megabytes in each step."""

CORE_GROWTH_BYTES = 8 * 2**20

FIRST_WAIT, LAST_WAIT = 2, 512
"""Looks without growth until the second release, and the maximum between two releases."""

_STATM = Path("/proc/self/statm")


def limit_free_memory() -> bool:
    """Makes glibc keep little freed memory, for a front end. Call it before any thread starts. Returns False, and
    changes nothing, with other C libraries, which lack these settings.

    A front end allocates and frees megabytes in a dozen threads, and by default glibc:

    - gives each thread a separate arena, up to eight per core. An arena shrinks only from its end, so each keeps its
      peak, and a server grows for hours. `ARENAS` suffice: most of this work holds Python's lock.
    - maps blocks above a size separately, and unmaps them when freed, but raises that size up to 32 MiB after freeing a
      block of it, and with it how much stays free at the end of the heap. Then blocks of megabytes lie between small
      blocks that stay. Here both sizes are fixed: `MAPPED_BYTES`, `TRIMMED_BYTES`.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    for parameter, value in (
        (_M_ARENA_MAX, ARENAS),
        (_M_MMAP_THRESHOLD, MAPPED_BYTES),
        (_M_TRIM_THRESHOLD, TRIMMED_BYTES),
    ):
        library.mallopt(parameter, value)
    return True


def release_free_memory() -> bool:
    """Returns all free pages to the system, also those between blocks in use, in a few ms. False without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


class FreeMemory:
    """Releases a process's free memory whenever it has grown by `growth` bytes, and again after `FIRST_WAIT` looks
    without growth, after twice as many, and so on, because the cause of the growth may be over by then. glibc itself
    releases only the end of the heap. Call `look` about once a second."""

    def __init__(self, growth: int = GROWTH_BYTES) -> None:
        self._growth = growth
        self._least = resident_bytes()
        self._wait = self._looks_left = 0

    def look(self) -> None:
        """Releases free memory if it is due. Does nothing if the system does not report the process's memory."""
        now = resident_bytes()
        if now > self._least + self._growth:
            self._wait = FIRST_WAIT
        elif self._looks_left > 1 or not self._wait:
            self._looks_left -= 1
            self._least = min(self._least, now)
            return
        else:
            self._wait = 0 if self._wait >= LAST_WAIT else 2 * self._wait
        self._looks_left = self._wait
        if release_free_memory():
            self._least = resident_bytes()


@contextmanager
def releasing_free_memory(seconds: float = 1.0) -> Iterator[None]:
    """Releases free memory now, and then every `seconds` as `FreeMemory` decides, in a thread, for a core that has
    loaded its model: compilers and checkpoints leave more free memory than a small model needs, in an arena of each of
    their threads. Unlike in a front end, arenas and block sizes stay glibc's defaults: a step uses a few blocks of
    megabytes, and mapping each of them again would cost page faults in every step."""
    release_free_memory()
    memory, over = FreeMemory(CORE_GROWTH_BYTES), threading.Event()

    def look() -> None:
        while not over.wait(seconds):
            memory.look()

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resident_bytes() -> int:
    """Resident memory of this process; 0 on systems other than Linux."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
