"""Regular log lines while a model is loaded and warmed up, so that a slow start does not look stuck."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 4.0


@contextmanager
def log_every_few_seconds(describe: Callable[[], str]) -> Iterator[None]:
    """Logs `describe()`, called on another thread, every `SECONDS_BETWEEN_LINES` until the block ends."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            logger.info("%s", describe())

    thread = threading.Thread(target=say, name="start-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class WarmUpProgress:
    """The `progress` of `Runner.warm_up`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._so_far: tuple[int, int] | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        self._so_far = done, total

    def describe(self) -> str:
        """Returns a line with the time left, extrapolated from the programs so far, which are the slowest."""
        seconds = time.perf_counter() - self._begin
        if self._so_far is None:
            return f"Warming up: {seconds:.0f} s so far"
        done, total = self._so_far
        left = f"about {seconds / done * (total - done):.0f} s left" if done else f"{seconds:.0f} s so far"
        return (
            f"Warming up: {done} of {total} programs, {left} "
            "(the first start compiles them; later ones find them in the cache)"
        )
