"""Returns freed memory, which the C library keeps, to the system."""

from __future__ import annotations

import contextlib
import ctypes

_EVERY = 64 << 20


class FreedMemory:
    """Counts freed bytes while weights are loaded. glibc keeps freed blocks of up to 32 MiB, and reuses few of those
    between other blocks: of a model whose matrices are repacked one by one, a quarter was in memory twice."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, freed: int) -> None:
        """Counts `freed` bytes, and returns free pages to the system after each 64 MiB."""
        self._bytes += freed
        if self._bytes >= _EVERY:
            self.give_back()

    def give_back(self) -> None:
        """Returns free pages to the system, if the C library is glibc."""
        self._bytes = 0
        with contextlib.suppress(AttributeError):  # other C libraries lack the function, and keep little
            ctypes.CDLL(None).malloc_trim(0)
