"""The queue between the input and the replicas."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from sglang_jax.batch.lines import Line
from sglang_jax.engine.lookahead import Lookahead


@dataclass(slots=True)
class Job:
    """A line in progress. `losses`: engines that were lost while they had it."""

    line: Line
    losses: int = 0


class WorkQueue:
    """A queue from which all replicas take lines as soon as they have room. When an engine is lost, any of its lines
    may be the cause, so all of them are retried, at most `max_retries` times. On its last retry, a line has an engine
    to itself, so a line that kills engines makes no other line fail. `max_bytes`: replicas wait while lines in progress
    have this many bytes; None for no limit."""

    def __init__(self, window: Lookahead[Line], max_retries: int, max_bytes: int | None = None) -> None:
        self.num_retries = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._window = window
        self._max_retries = max_retries
        self._retries: deque[Job] = deque()
        self._isolated: deque[Job] = deque()
        self._isolated_replica: int | None = None
        self._in_flight: Counter[int] = Counter()
        self._reading = True
        self._line_ready: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing is left to take, now or later."""
        waiting = len(self._window) or self._retries or self._isolated
        return not self._reading and not waiting and not self._in_flight.total()

    @property
    def full(self) -> bool:
        return self._window.full

    @property
    def _too_many_bytes(self) -> bool:
        return self._max_bytes is not None and self._bytes >= self._max_bytes

    def push(self, line: Line) -> None:
        self._window.push(line, key=line.key, number=line.number, size=line.size)

    def wake(self) -> None:
        self._wake_replicas()

    def end_of_input(self) -> None:
        self._reading = False
        self._wake_replicas()

    async def room(self) -> None:
        """Waits until a line is taken or finished."""
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    async def next(self, replica: int) -> Job | None:
        """Waits for a line, which the replica owns until `finish` or `lose`; None once all lines are finished."""
        while (job := self._take(replica)) is None and not self.finished:
            if self._line_ready is None or self._line_ready.done():
                self._line_ready = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._line_ready)
        return job

    def finish(self, replica: int, job: Job) -> None:
        too_many = self._too_many_bytes
        self._in_flight[replica] -= 1
        self._bytes -= job.line.size
        self._wake_readers()
        if too_many or self._isolated_replica == replica or not self._in_flight.total():
            self._wake_replicas()

    def give_back(self, replica: int, job: Job) -> None:
        """Takes back a line that the replica did not start. A line that must run in isolation still will."""
        (self._isolated if job.losses and job.losses == self._max_retries else self._retries).append(job)
        self.finish(replica, job)
        self._wake_replicas()

    def lose(self, replica: int, job: Job) -> bool:
        """Takes back a line of a lost engine for a retry. False without retries left: the caller calls `finish`."""
        job.losses += 1
        if job.losses > self._max_retries:
            return False
        self.num_retries += 1
        (self._isolated if job.losses == self._max_retries else self._retries).append(job)
        self._window.forget(replica)
        self.finish(replica, job)
        self._wake_replicas()
        return True

    def leave(self, replica: int) -> None:
        self._window.forget(replica)
        if self._isolated_replica == replica:
            self._isolated_replica = None
        self._wake_replicas()

    def _take(self, replica: int) -> Job | None:
        if self._isolated and self._isolated_replica is None:
            self._isolated_replica = replica
        if self._isolated_replica == replica:
            if self._in_flight[replica]:
                return None
            if not self._isolated:
                self._isolated_replica = None
        job = None if self._too_many_bytes else self._choose(replica)
        if job is not None:
            self._in_flight[replica] += 1
            self._bytes += job.line.size
            self._wake_readers()
        return job

    def _choose(self, replica: int) -> Job | None:
        if self._isolated_replica == replica:
            return self._isolated.popleft()
        if self._retries:
            return self._retries.popleft()
        line = self._window.take(replica)
        return None if line is None else Job(line)

    def _wake_replicas(self) -> None:
        if self._line_ready is not None and not self._line_ready.done():
            self._line_ready.set_result(None)

    def _wake_readers(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
