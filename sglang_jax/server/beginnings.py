"""Requests of which only a part has come: how much of them all is held."""

from __future__ import annotations

import logging
from typing import Protocol

from sglang_jax.errors import RequestError
from sglang_jax.logs import OnceASecond
from sglang_jax.server.errors import BusyError

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())


class Beginner(Protocol):
    """Who has sent a part of something."""

    def refuse(self, error: RequestError) -> None:
        """Answers with this error instead, and keeps nothing of what came."""
        ...


class Beginnings:
    """Parts of what comes over all connections. Beyond `most` bytes together the oldest is refused of those that are at
    least half as long as their average: who sends without pauses is done before that, however many others are silent,
    and who has sent little is in nobody's way. All methods run on one event loop.

    **Arguments:** `what`: in the plural, for errors.
    """

    def __init__(self, most: int, what: str) -> None:
        self.num_bytes = 0
        self._most = most
        self._what = what
        self._sizes: dict[Beginner, int] = {}

    def hold(self, whose: Beginner, size: int) -> None:
        """So many bytes of somebody's are held now; none once it is whole, or its client has left."""
        before = self._sizes.get(whose, 0)
        if size:
            self._sizes[whose] = size
        elif before:
            del self._sizes[whose]
        self.num_bytes += size - before
        while self.num_bytes > self._most:
            least = self.num_bytes / len(self._sizes) / 2
            oldest = next(whose for whose, length in self._sizes.items() if length >= least)
            length = self._sizes.pop(oldest)
            held, self.num_bytes = self.num_bytes, self.num_bytes - length  # before its refusal asks to hold none
            logger.warning(
                "Refused a request of which %d bytes had come: %d bytes of unfinished %s are held",
                length,
                held,
                self._what,
            )
            oldest.refuse(
                BusyError(
                    f"the unfinished {self._what} of all requests hold {held} bytes, this one {length}; the "
                    f"limit is {self._most}. Send it without pauses, or try again later"
                )
            )
