"""A limit for the memory of requests that have arrived only in part."""

from __future__ import annotations

import logging
from typing import Protocol

from sglang_jax.errors import RequestError
from sglang_jax.logs import OnceASecond
from sglang_jax.server.errors import BusyError

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())


class PartialRequest(Protocol):
    """A request, or the head of one, that has arrived only in part."""

    def refuse(self, error: RequestError) -> None:
        """Answers with this error, and discards what has arrived."""
        ...


class PartialRequests:
    """Bounds the bytes of partial requests over all connections together. `what`: these, in the plural, for errors.

    Above `most` bytes, it refuses the oldest of those that are at least half as long as the average. A client that
    sends without pauses has finished before that, however many others are silent, and one that has sent little frees
    little. All methods run on one event loop.
    """

    def __init__(self, most: int, what: str) -> None:
        self.num_bytes = 0
        self._most = most
        self._what = what
        self._sizes: dict[PartialRequest, int] = {}

    def hold(self, request: PartialRequest, size: int) -> None:
        """Sets the bytes that a partial request holds now: 0 once it is complete or its client has left."""
        before = self._sizes.get(request, 0)
        if size:
            self._sizes[request] = size
        elif before:
            del self._sizes[request]
        self.num_bytes += size - before
        while self.num_bytes > self._most:
            least = self.num_bytes / len(self._sizes) / 2
            oldest = next(request for request, length in self._sizes.items() if length >= least)
            length = self._sizes.pop(oldest)
            held, self.num_bytes = self.num_bytes, self.num_bytes - length  # `refuse` calls `hold(..., 0)`
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
