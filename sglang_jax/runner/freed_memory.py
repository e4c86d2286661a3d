"""Memory that was freed and that the C library keeps, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes

_EVERY = 64 << 20


class FreedMemory:
    """Counts what is freed while weights are loaded. glibc keeps blocks of up to 32 MiB that are freed for later ones.
    Of those that lie between others little is used again: of a model whose matrices are re-laid one by one, a quarter
    was in memory twice."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, freed: int) -> None:
        """So many bytes were freed: after each 64 MiB, free pages go back to the system."""
        self._bytes += freed
        if self._bytes >= _EVERY:
            self.give_back()

    def give_back(self) -> None:
        """Free pages go back to the system, where the C library is glibc."""
        self._bytes = 0
        with contextlib.suppress(AttributeError):  # others have no such function, and keep little
            ctypes.CDLL(None).malloc_trim(0)
