"""Work for one client that others would wait for, in a thread and with pauses."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")

OTHERS_SHARE = 5
"""So many times as long as a piece of work took, no other begins."""

BYTES_PER_SECOND = 2**20
"""Who waits is due after as many seconds as its size takes at this rate. So small pieces go before large ones that came
a little earlier, and none waits for ever."""


class LongWork:
    """Does one piece at a time, and none for a while after each.

    A thread alone does not leave the event loop free: to parse and to check JSON is one call each, which keeps Python's
    lock to its end. However many clients send megabytes, a sixth of the time is theirs.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._free = True

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """What `work`, on so many bytes, returns or raises."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + size / BYTES_PER_SECOND, next(self._numbers), turn))
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been given its turn, and not yet heard of it
                self._begin_next(over=True)
            raise
        took = 0.0

        def timed() -> Result:
            nonlocal took
            begin = time.thread_time()
            try:
                return work()
            finally:
                took = time.thread_time() - begin

        working = loop.run_in_executor(self._thread, timed)  # to its end, whoever leaves meanwhile
        working.add_done_callback(lambda _: loop.call_later(took * OTHERS_SHARE, partial(self._begin_next, over=True)))
        return await asyncio.shield(working)

    def _begin_next(self, *, over: bool = False) -> None:
        self._free = self._free or over
        while self._free and self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self._free = False
                turn.set_result(None)
