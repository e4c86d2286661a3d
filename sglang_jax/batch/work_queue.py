"""Where lines wait for replicas, and replicas for lines."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from sglang_jax.batch.lines import Line
from sglang_jax.engine.lookahead import Lookahead


@dataclass(slots=True)
class Job:
    """A line on its way. `losses`: engines that were lost while they had it."""

    line: Line
    losses: int = 0


class WorkQueue:
    """One queue that all replicas take from, each as soon as it has room.

    When an engine is lost, each line that it had may be the cause. Those lines are asked again, and the last time that
    a line may be asked again it is alone in its engine: so a line that kills engines fails alone.

    **Arguments:** `max_retries`: maximum retries of a line whose engine was lost.
    """

    def __init__(self, window: Lookahead[Line], max_retries: int) -> None:
        self.num_retries = 0
        self._window = window
        self._max_retries = max_retries
        self._again: deque[Job] = deque()
        self._alone: deque[Job] = deque()
        self._alone_at: int | None = None
        self._in_flight: Counter[int] = Counter()
        self._reading = True
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Nothing is left to take, now or later."""
        waiting = len(self._window) or self._again or self._alone
        return not self._reading and not waiting and not self._in_flight.total()

    @property
    def full(self) -> bool:
        """No further line should be read yet."""
        return self._window.full

    def push(self, line: Line) -> None:
        """Adds a line that was read."""
        self._window.push(line, key=line.key, number=line.number, size=line.size)

    def pushed(self) -> None:
        """Lines were added: whoever waits for some looks again."""
        self._tell()

    def end_of_input(self) -> None:
        """No further line will come."""
        self._reading = False
        self._tell()

    async def room(self) -> None:
        """Waits until a line was taken or finished."""
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._room)

    async def next(self, replica: int) -> Job | None:
        """A line for this replica, which has it from now on until `finish` or `lose`; None once all are finished."""
        while (job := self._take(replica)) is None and not self.finished:
            if self._news is None or self._news.done():
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)
        return job

    def finish(self, replica: int) -> None:
        """The replica is done with a line."""
        self._in_flight[replica] -= 1
        self._made_room()
        if self._alone_at == replica or not self._in_flight.total():
            self._tell()

    def give_back(self, replica: int, job: Job) -> None:
        """The replica did not begin with a line. One that is to be alone in its engine stays so."""
        (self._alone if job.losses and job.losses == self._max_retries else self._again).append(job)
        self.finish(replica)
        self._tell()

    def lose(self, replica: int, job: Job) -> bool:
        """The engine was lost. False if the line was asked often enough: it has failed, and the caller calls
        `finish`."""
        job.losses += 1
        if job.losses > self._max_retries:
            return False
        self.num_retries += 1
        (self._alone if job.losses == self._max_retries else self._again).append(job)
        self._window.forget(replica)
        self.finish(replica)
        self._tell()
        return True

    def leave(self, replica: int) -> None:
        """The replica takes no more."""
        self._window.forget(replica)
        if self._alone_at == replica:
            self._alone_at = None
        self._tell()

    def _take(self, replica: int) -> Job | None:
        if self._alone and self._alone_at is None:
            self._alone_at = replica
        if self._alone_at == replica:
            if self._in_flight[replica]:
                return None
            if not self._alone:
                self._alone_at = None
        job = self._choose(replica)
        if job is not None:
            self._in_flight[replica] += 1
            self._made_room()
        return job

    def _choose(self, replica: int) -> Job | None:
        if self._alone_at == replica:
            return self._alone.popleft()
        if self._again:
            return self._again.popleft()
        line = self._window.take(replica)
        return None if line is None else Job(line)

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _made_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
