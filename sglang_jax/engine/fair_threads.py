"""Threads that take up work in turns of those it is for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class _Flow:
    """What a request has waiting. `due`: of its last piece."""

    due: float
    waiting: int = 0


@dataclass(slots=True)
class _Tenant:
    """`begin`: how much of the work was its own, or everybody's when it came; `served`: when its latest piece was due
    among its own; `pieces`: in their order, with when they are due."""

    begin: float
    served: float = 0.0
    pieces: list[tuple[float, int, Piece]] = field(default_factory=list)
    flows: dict[str, _Flow] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of work. `over`: it waits no longer, as its turn has come or nobody waits for it."""

    size: int
    tenant: str
    flow: str
    turn: asyncio.Future[None]
    over: bool = False


class Turns:
    """Pieces of work that wait for their turn: the tenants', each of which has had as much as the others, then those of
    a tenant's flows. A piece is due when it would end if all had their shares at once (weighted fair queueing), so a
    small one of somebody who has nothing else comes before the large ones of others, and none waits for ever."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._served = 0.0
        self._numbers = itertools.count()

    def put(self, piece: Piece) -> None:
        """Adds a piece."""
        tenant = self._tenants.setdefault(piece.tenant, _Tenant(begin=self._served))
        flow = tenant.flows.setdefault(piece.flow, _Flow(due=tenant.served))
        flow.due = max(flow.due, tenant.served) + piece.size
        flow.waiting += 1
        heapq.heappush(tenant.pieces, (flow.due, next(self._numbers), piece))

    def get(self) -> Piece | None:
        """Whose turn it is; None if nothing waits."""
        if not self._tenants:
            return None
        tenant = min(self._tenants.values(), key=lambda one: one.begin + one.pieces[0][2].size)
        tenant.served, _, piece = heapq.heappop(tenant.pieces)
        tenant.begin += piece.size
        self._served = max(self._served, tenant.begin)
        self._forget(piece)
        return piece

    def leave(self, piece: Piece) -> None:
        """Nobody waits for a piece any more."""
        if not piece.over:
            self._forget(piece)

    def _forget(self, piece: Piece) -> None:
        piece.over = True
        tenant = self._tenants[piece.tenant]
        tenant.flows[piece.flow].waiting -= 1
        if not tenant.flows[piece.flow].waiting:
            del tenant.flows[piece.flow]
        while tenant.pieces and tenant.pieces[0][2].over:
            heapq.heappop(tenant.pieces)
        if not tenant.pieces:
            del self._tenants[piece.tenant]


class FairThreads:
    """Runs work in threads, in the order of `Turns`. Work that nobody waits for any more is not begun. All methods run
    on one event loop.

    **Arguments:** `rest`: so many times as long as a piece took of a processor's time, its thread begins no other.
    """

    def __init__(self, threads: int, name: str, *, rest: float = 0.0) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._turns = Turns()
        self._rest = rest

    async def run(self, work: Callable[[], Result], *, size: int, tenant: str = "", flow: str = "") -> Result:
        """What `work`, of about this size, returns or raises; for the request `flow` of a tenant."""
        loop = asyncio.get_running_loop()
        piece = Piece(size, tenant, flow, loop.create_future())
        self._turns.put(piece)
        self._begin()
        try:
            await piece.turn
        except asyncio.CancelledError:
            if piece.turn.cancelled():
                self._turns.leave(piece)
            else:  # its turn had come, and it had not heard of it
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

        working = loop.run_in_executor(self._threads, timed)  # to its end, whoever leaves meanwhile
        working.add_done_callback(lambda _: self._end_after(took * self._rest))
        return await asyncio.shield(working)

    def close(self) -> None:
        """Ends the threads once they are done with what they have."""
        self._threads.shutdown(wait=False)

    def _begin(self) -> None:
        while self._free and (piece := self._turns.get()) is not None:
            if not piece.turn.cancelled():  # otherwise its task has still to hear of it
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
