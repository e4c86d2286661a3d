"""A limit for the memory of long answers that wait until their clients read them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from sglang_jax.logs import OnceASecond

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MAX_HELD_BYTES = 64 * 2**20

PAUSE_SECONDS = 1.0
"""A client that has read nothing for this long may lose its answer. One that keeps reading never does."""

_EXTENSION = "sglang_jax.held_answers"
"""The key in ASGI's `extensions` under which a connection passes its `HeldAnswers` and its close function."""


class HeldAnswer:
    """An answer that its client has not read completely. `left`: unread bytes; `read_at`: when the client last read;
    `dropped`: its connection was closed."""

    def __init__(self, left: int, drop: Callable[[], None]) -> None:
        self.left = left
        self.read_at = time.monotonic()
        self.dropped = False
        self._drop = drop

    def drop(self) -> None:
        self.dropped = True
        self._drop()


class HeldAnswers:
    """The long answers of a server. Above `MAX_HELD_BYTES` in total, closes answers whose clients have read nothing for
    `PAUSE_SECONDS`, longest idle first, until the rest fits. All methods run on one event loop."""

    def __init__(self) -> None:
        # Ordered by their clients' last read.
        self._answers: dict[HeldAnswer, None] = {}
        self.num_bytes = 0

    def add(self, answer: HeldAnswer) -> None:
        """Adds an answer that is ready, and closes others above the limit."""
        self._answers[answer] = None
        self.num_bytes += answer.left
        pause_began = time.monotonic() - PAUSE_SECONDS
        while self.num_bytes > MAX_HELD_BYTES:
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

    def note_sent(self, answer: HeldAnswer, size: int) -> None:
        answer.left -= size
        answer.read_at = time.monotonic()
        if answer in self._answers:
            self.num_bytes -= size
            self._answers[answer] = self._answers.pop(answer)

    def remove(self, answer: HeldAnswer) -> None:
        if answer in self._answers:
            del self._answers[answer]
            self.num_bytes -= answer.left


def share_limit(scope: Scope, held: HeldAnswers, drop: Callable[[], None]) -> None:
    """Lets answers to requests of a connection share the limit. `drop` closes the connection."""
    scope.setdefault("extensions", {})[_EXTENSION] = (held, drop)


@contextmanager
def hold(scope: Scope, size: int) -> Iterator[Callable[[int], bool]]:
    """Holds an answer of `size` bytes. Yields a function to call with the size of each part that was sent, which
    returns whether the rest is still wanted: always, if the connection shares no limit."""
    held, drop = scope.get("extensions", {}).get(_EXTENSION, (None, None))
    if held is None:
        yield lambda _: True
        return
    answer = HeldAnswer(size, drop)
    held.add(answer)

    def sent(part: int) -> bool:
        held.note_sent(answer, part)
        return not answer.dropped

    try:
        yield sent
    finally:
        held.remove(answer)
