"""Memory that was freed goes back to the system."""

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
"""A process that has grown by so much gives back what it has free."""

CORE_GROWTH_BYTES = 8 * 2**20
"""The same for a core, whose steps take and free megabytes again and again."""

FIRST_WAIT, LAST_WAIT = 2, 512
"""After how many looks without growth it does so once more, and for the last time."""

_STATM = Path("/proc/self/statm")


def limit_free_memory() -> bool:
    """For a front end: has glibc keep little of what was freed. Before any thread starts; False, with nothing changed,
    where the C library is another one, which has no such settings.

    Bodies, texts and answers of megabytes come and go in a front end, in a dozen threads, and by default glibc:

    - gives each thread an arena of its own, up to eight for each core. An arena shrinks from its end only, so that
      each keeps what its busiest moment took, and a server grows for hours. Here there are `ARENAS`: most of this work
      holds Python's lock, and waits for no other.
    - raises the size from which memory is mapped by itself, and goes back at once, up to 32 MiB once a block of that
      size was freed, and with it what may stay free at the end of the heap. Blocks of megabytes then lie in the heap
      between small ones that stay. Here both stay what they are: `MAPPED_BYTES`, `TRIMMED_BYTES`.
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


def give_memory_back() -> bool:
    """Gives the system all pages that the allocator has free, between blocks in use as well, in a few milliseconds.
    False where the C library is not glibc, and has no way to."""
    if platform.libc_ver()[0] != "glibc":
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


class FreeMemory:
    """Gives a process's free memory back each time that it has grown, and again after `FIRST_WAIT` looks without
    growth, twice as many, and so on, as what made it grow may be over then; looks when it is asked to, about once a
    second.

    What a burst took lies free between blocks that stay, where glibc by itself gives back the heap's end alone.

    **Arguments:** `growth`: bytes by which it must have grown.
    """

    def __init__(self, growth: int = GROWTH_BYTES) -> None:
        self._growth = growth
        self._least = resident_bytes()
        self._wait = self._looks_left = 0

    def look(self) -> None:
        """Does nothing where the operating system does not tell."""
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
        if give_memory_back():
            self._least = resident_bytes()


@contextmanager
def memory_given_back(seconds: float = 1.0) -> Iterator[None]:
    """For a core that has loaded its model: free memory goes back now, and from then on as `FreeMemory` says, which a
    thread asks every `seconds`.

    Compilers and checkpoints leave more free than a small model takes, in an arena of each of their threads. Arenas
    and sizes of blocks stay glibc's, other than in a front end: what a step computes lies in a few blocks of megabytes,
    and to map each of them anew would cost their pages in every step.
    """
    give_memory_back()
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
    """Memory that this process has; 0 where only Linux would tell."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
