"""Answers of megabytes that wait for their clients: how much of all is held."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from sglang_jax.logs import OnceASecond

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MOST_HELD_BYTES = 64 * 2**20

PAUSE_SECONDS = 1.0
"""Who has read nothing for so long may lose an answer; who reads does not, however much comes for others."""

_EXTENSION = "sglang_jax.held_answers"
"""Of ASGI's `extensions`: where a connection tells the application with whom it shares the limit, and how to end it."""


class HeldAnswer:
    """An answer that its client has still to read. `left`: bytes of it; `read_at`: when some of it was read, or when it
    was ready; `dropped`: nobody will read the rest."""

    def __init__(self, left: int, drop: Callable[[], None]) -> None:
        self.left = left
        self.read_at = time.monotonic()
        self.dropped = False
        self._drop = drop

    def drop(self) -> None:
        """Ends the connection."""
        self.dropped = True
        self._drop()


class HeldAnswers:
    """The long answers of a server. Beyond `MOST_HELD_BYTES` together those are cut off whose clients have read nothing
    for `PAUSE_SECONDS`, who read last before the others first, until the rest is within that.

    All methods run on one event loop.
    """

    def __init__(self) -> None:
        # In the order in which their clients read last.
        self._answers: dict[HeldAnswer, None] = {}
        self.num_bytes = 0

    def add(self, answer: HeldAnswer) -> None:
        """An answer is ready; others may have to go for it."""
        self._answers[answer] = None
        self.num_bytes += answer.left
        pause_began = time.monotonic() - PAUSE_SECONDS
        while self.num_bytes > MOST_HELD_BYTES:
            oldest = next(iter(self._answers))
            if oldest is answer or oldest.read_at > pause_began:
                return
            logger.warning(
                "Closed a connection with %d unread bytes: %d MiB of responses are waiting to be read, and its client "
                "has read nothing for %g s",
                oldest.left,
                self.num_bytes >> 20,
                time.monotonic() - oldest.read_at,
            )
            self.remove(oldest)
            oldest.drop()

    def sent(self, answer: HeldAnswer, size: int) -> None:
        """So many bytes of an answer are its client's, or on their way."""
        answer.left -= size
        answer.read_at = time.monotonic()
        if answer in self._answers:
            self.num_bytes -= size
            self._answers[answer] = self._answers.pop(answer)

    def remove(self, answer: HeldAnswer) -> None:
        """Nothing more of it is held."""
        if answer in self._answers:
            del self._answers[answer]
            self.num_bytes -= answer.left


def share_limit(scope: Scope, held: HeldAnswers, drop: Callable[[], None]) -> None:
    """Tells the application of a request on a connection, which `drop` ends."""
    scope.setdefault("extensions", {})[_EXTENSION] = (held, drop)


@contextmanager
def hold(scope: Scope, size: int) -> Iterator[Callable[[int], bool]]:
    """Holds an answer of `size` bytes. What it yields is to be called with the size of each part that was sent, and
    tells whether the rest is still wanted. Without a connection that shares a limit there is none."""
    held, drop = scope.get("extensions", {}).get(_EXTENSION, (None, None))
    if held is None:
        yield lambda _: True
        return
    answer = HeldAnswer(size, drop)
    held.add(answer)

    def sent(part: int) -> bool:
        held.sent(answer, part)
        return not answer.dropped

    try:
        yield sent
    finally:
        held.remove(answer)
