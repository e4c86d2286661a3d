"""The front end's memory goes back to the system."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""

ARENAS = 2
MAPPED_BYTES = 131_072
TRIMMED_BYTES = 1_048_576


def give_memory_back() -> bool:
    """Has glibc keep little of what was freed. Before any thread starts; False, with nothing changed, where the C
    library is another one, which has no such settings.

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
