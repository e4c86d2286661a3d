"""Requests of which only a part has come: how much of them all is held."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from sglang_jax.errors import RequestError
from sglang_jax.server.errors import BusyError

logger = logging.getLogger(__name__)


_SECONDS_BETWEEN_WARNINGS = 1.0
"""However many are refused, as a log is written by the event loop, and kept on a disk."""


class Beginner(Protocol):
    """Who has sent a part of something."""

    def refuse(self, error: RequestError) -> None:
        """Answers with this error instead, and keeps nothing of what came."""
        ...


class Beginnings:
    """Parts of what comes over all connections. Beyond `most` bytes together the longest part is refused, and of equal
    ones the oldest. All methods run on one event loop.

    **Arguments:** `what`: in the plural, for errors.
    """

    def __init__(self, most: int, what: str) -> None:
        self.num_bytes = 0
        self._most = most
        self._what = what
        self._sizes: dict[Beginner, int] = {}
        self._refused = 0
        self._warned_at = -_SECONDS_BETWEEN_WARNINGS

    def hold(self, whose: Beginner, size: int) -> None:
        """So many bytes of somebody's are held now; none once it is whole, or its client has left."""
        before = self._sizes.get(whose, 0)
        if size:
            self._sizes[whose] = size
        elif before:
            del self._sizes[whose]
        self.num_bytes += size - before
        while self.num_bytes > self._most:
            longest = max(self._sizes, key=self._sizes.__getitem__)
            length = self._sizes.pop(longest)
            self._warn(length)
            longest.refuse(
                BusyError(
                    f"the unfinished {self._what} of all requests hold {self.num_bytes} bytes, this one {length}; the "
                    f"limit is {self._most}. Send it without pauses, or try again later"
                )
            )
            self.num_bytes -= length

    def _warn(self, length: int) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._warned_at < _SECONDS_BETWEEN_WARNINGS:
            return
        logger.warning(
            "Refused a request of which %d bytes had come: %d bytes of unfinished %s are held (%d refused since the "
            "last such line)",
            length,
            self.num_bytes,
            self._what,
            self._refused,
        )
        self._refused, self._warned_at = 0, now
