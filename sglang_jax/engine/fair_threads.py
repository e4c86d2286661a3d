"""Threads that share their time fairly among tenants."""

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
    """A request's waiting work. `due`: when its last piece is due on the tenant's clock."""

    due: float
    waiting: int = 0


@dataclass(slots=True)
class _Tenant:
    """A tenant with waiting work. `served`: size of its work so far, at least the clock at its arrival; `clock`: when
    its latest piece was due among its own; `pieces`: a heap of (due, number, piece)."""

    served: float
    clock: float = 0.0
    pieces: list[tuple[float, int, Piece]] = field(default_factory=list)
    flows: dict[str, _Flow] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Piece:
    """A piece of work. `turn`: done when it may run; `over`: it was taken, or its caller has left."""

    size: int
    tenant: str
    flow: str
    turn: asyncio.Future[None]
    over: bool = False


class FairOrder:
    """Orders waiting pieces of work by weighted fair queueing, first among tenants, then among a tenant's flows. A
    piece is due when it would end if all shared the threads equally: a small piece of a tenant without other work
    precedes the large pieces of others, and no piece starves."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0.0
        self._numbers = itertools.count()

    def put(self, piece: Piece) -> None:
        tenant = self._tenants.setdefault(piece.tenant, _Tenant(served=self._clock))
        flow = tenant.flows.setdefault(piece.flow, _Flow(due=tenant.clock))
        flow.due = max(flow.due, tenant.clock) + piece.size
        flow.waiting += 1
        heapq.heappush(tenant.pieces, (flow.due, next(self._numbers), piece))

    def get(self) -> Piece | None:
        if not self._tenants:
            return None
        tenant = min(self._tenants.values(), key=lambda one: one.served + one.pieces[0][2].size)
        tenant.clock, _, piece = heapq.heappop(tenant.pieces)
        tenant.served += piece.size
        self._clock = max(self._clock, tenant.served)
        self._forget(piece)
        return piece

    def leave(self, piece: Piece) -> None:
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
    """Runs work in threads, in the order of `FairOrder`; skips work whose caller has left. All methods run on one event
    loop. After a piece, its thread is idle for `rest` times the processor time that the piece took."""

    def __init__(self, threads: int, name: str, *, rest: float = 0.0) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._order = FairOrder()
        self._rest = rest

    async def run(self, work: Callable[[], Result], *, size: int, tenant: str = "", flow: str = "") -> Result:
        """Runs `work`, of about this size, for the request `flow` of a tenant. Returns or raises what it does."""
        loop = asyncio.get_running_loop()
        piece = Piece(size, tenant, flow, loop.create_future())
        self._order.put(piece)
        self._begin()
        try:
            await piece.turn
        except asyncio.CancelledError:
            if piece.turn.cancelled():
                self._order.leave(piece)
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
        while self._free and (piece := self._order.get()) is not None:
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
