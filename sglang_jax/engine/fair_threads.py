"""Threads that share their time fairly among tenants."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from sglang_jax.queues.fair_queue import FairQueue

Result = TypeVar("Result")


_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of work. `turn`: done when it may run; `waiting`: it is in the queue."""

    size: int
    tenant: str
    flow: str
    turn: asyncio.Future[None]
    number: int = field(default_factory=_numbers.__next__)
    waiting: bool = False


class Pieces:
    """Waiting pieces of work by weighted fair queueing, first among tenants, then among a tenant's flows: a small piece
    of a tenant without other work precedes the large pieces of others, and no piece starves."""

    def __init__(self) -> None:
        self._queue: FairQueue[Piece] = FairQueue(
            lambda piece: (piece.tenant, piece.flow),
            lambda piece: piece.number,
            lambda piece: piece.size,
            key=lambda piece: (piece.number,),
            by_finish=True,
        )

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, piece: Piece) -> None:
        piece.waiting = True
        self._queue.add(piece)

    def get(self) -> Piece | None:
        if not self._queue:
            return None
        piece = self._queue.head()
        piece.waiting = False
        self._queue.remove(piece, piece.size)
        return piece

    def leave(self, piece: Piece) -> None:
        """Removes a piece, unless it was taken."""
        if piece.waiting:
            piece.waiting = False
            self._queue.remove(piece)


class FairThreads:
    """Runs work in threads, in the order of `Pieces`; skips work whose caller has left. All methods run on one event
    loop. After a piece, its thread is idle for `rest` times the processor time that the piece took."""

    def __init__(self, threads: int, name: str, *, rest: float = 0.0) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._pieces = Pieces()
        self._rest = rest

    async def run(self, work: Callable[[], Result], *, size: int, tenant: str = "", flow: str = "") -> Result:
        """Runs `work`, of about this size, for the request `flow` of a tenant. Returns or raises what it does."""
        loop = asyncio.get_running_loop()
        piece = Piece(size, tenant, flow, loop.create_future())
        self._pieces.put(piece)
        self._begin()
        try:
            await piece.turn
        except asyncio.CancelledError:
            if piece.turn.cancelled():
                self._pieces.leave(piece)
            else:  # it was given a thread, but cancelled before it resumed
                self._end()
            raise
        took = 0.0

        def timed() -> Result:
            nonlocal took
            begin = time.thread_time()
            try:
                return work()
            finally:
                took = time.thread_time() - begin

        working = loop.run_in_executor(self._threads, timed)  # runs to its end even if the caller leaves
        working.add_done_callback(lambda _: self._end_after(took * self._rest))
        return await asyncio.shield(working)

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._threads.shutdown(wait=False)

    def _begin(self) -> None:
        while self._free and (piece := self._pieces.get()) is not None:
            if not piece.turn.cancelled():  # otherwise its task has not handled the cancellation yet
                self._free -= 1
                piece.turn.set_result(None)

    def _end_after(self, seconds: float) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._free += 1
        self._begin()
