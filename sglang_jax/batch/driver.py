"""Reads lines, lets replicas answer them, and passes the answers to the sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from msgspec import Raw
from starlette.types import ASGIApp

from sglang_jax.batch.answers import Answer, answer_of, error_answer, post
from sglang_jax.batch.journal import Sink
from sglang_jax.batch.lines import MAX_LINE_BYTES, BadLine, Line, parse_line
from sglang_jax.batch.source import Record
from sglang_jax.batch.work_queue import Job, WorkQueue
from sglang_jax.engine.batch import FLIGHTS_PER_ROW
from sglang_jax.engine.types import EngineClient
from sglang_jax.errors import EngineDeadError

READ_LINES = 256
"""Maximum lines that are read and parsed together; fewer if the window is smaller."""

READ_BYTES = 4 * 2**20
"""Reading stops earlier once the lines have this many bytes."""

SYNC_SECONDS = 5.0
"""Seconds between syncs: a crash of the machine may lose lines written since the last one."""


BUSY_SECONDS = 1.0
"""Seconds until a line that the server has no room for is sent again."""


class ServedEngine(EngineClient, Protocol):
    @property
    def max_running_requests(self) -> int:
        """Maximum completions that it runs at once."""
        ...


class ServingReplica(Protocol):
    """A replica as the driver sees it."""

    @property
    def index(self) -> int: ...

    async def serving(self) -> ServedEngine:
        """Waits until the engine serves, and returns it. Raises `EngineDeadError` if the replica has stopped."""
        ...


class Watcher(Protocol):
    def finished(self, answer: Answer) -> None:
        """Notes that a line was written or spooled."""
        ...


MakeApp = Callable[[ServedEngine], ASGIApp]


@dataclass(frozen=True, slots=True)
class _ServingApp:
    engine: ServedEngine
    app: ASGIApp


class Driver:
    """Answers every line that the sink does not have.

    - `records`: the input, without lines that are written already. It is iterated in threads, one at a time.
    - `defaults`, `random_seed`: see `parse_line`; `read_lines`: maximum lines read and parsed together.
    - `max_ahead`: maximum lines read beyond the oldest unfinished line, if the sink keeps the order.
    - `max_in_flight`: maximum lines that each replica answers at once; None for as many as keep its rows busy.
    """

    def __init__(
        self,
        records: Iterator[Record],
        sink: Sink,
        queue: WorkQueue,
        watcher: Watcher,
        *,
        defaults: Mapping[str, Raw],
        random_seed: int,
        read_lines: int = READ_LINES,
        max_ahead: int,
        make_app: MakeApp,
        max_in_flight: int | None = None,
    ) -> None:
        self._records = records
        self._sink = sink
        self._queue = queue
        self._watcher = watcher
        self._defaults = defaults
        self._random_seed = random_seed
        self._read_lines = read_lines
        self._max_ahead = max_ahead
        self._make_app = make_app
        self._max_in_flight = max_in_flight
        self._apps: dict[int, _ServingApp] = {}

    async def run(self, replicas: Sequence[ServingReplica]) -> None:
        """Runs until every line is finished and on disk. Raises `BatchError` if a file cannot be read or written;
        `EngineDeadError` once no replica is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                syncing = tasks.create_task(self._sync_at_intervals())
                reading = tasks.create_task(self._read_all())
                serving = tasks.create_task(self._serve_all(replicas))
                await asyncio.wait({reading, serving}, return_when=asyncio.FIRST_EXCEPTION)
                syncing.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        await asyncio.to_thread(self._sink.sync)

    async def _sync_at_intervals(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self._sink.sync)

    async def _read_all(self) -> None:
        while lines := await asyncio.to_thread(self._read_some):
            for line in lines:
                self._accept(line)
            self._queue.wake()
            while self._queue.full or self._sink.num_ahead >= self._max_ahead:
                await self._queue.room()
        self._queue.end_of_input()

    def _read_some(self) -> list[Line | BadLine]:
        """Reads and parses some lines. Runs in a thread, so that the engine gets requests meanwhile."""
        lines: list[Line | BadLine] = []
        size = 0
        for record in islice(self._records, self._read_lines):
            lines.append(self._parse(record))
            size += len(record.raw or b"")
            if size >= READ_BYTES:
                break
        return lines

    def _parse(self, record: Record) -> Line | BadLine:
        if record.raw is None:
            message = f"a line may have at most {MAX_LINE_BYTES} bytes, this one has more"
            return BadLine(record.number, None, "line_too_long", message)
        return parse_line(record.number, record.raw, self._defaults, random_seed=self._random_seed)

    def _accept(self, line: Line | BadLine) -> None:
        spooled = self._sink.is_finished(line.number)
        self._sink.expect(line.number)
        if spooled:
            return
        if isinstance(line, BadLine):
            self._finish(line.number, error_answer(line, line.code, line.message))
        else:
            self._queue.push(line)

    async def _serve_all(self, replicas: Sequence[ServingReplica]) -> None:
        """Runs until all lines are finished or no replica is left. Raises the last one's `EngineDeadError`."""
        losses = await asyncio.gather(*(self._serve(replica) for replica in replicas))
        if not self._queue.finished:
            raise next(loss for loss in reversed(losses) if loss is not None)

    async def _serve(self, replica: ServingReplica) -> EngineDeadError | None:
        """Keeps a replica busy. Returns the error if the replica has stopped."""
        try:
            engine = await replica.serving()
            async with asyncio.TaskGroup() as group:
                count = self._max_in_flight or FLIGHTS_PER_ROW * engine.max_running_requests
                workers = [group.create_task(self._work(replica)) for _ in range(count)]
            return next((loss for worker in workers if (loss := worker.result()) is not None), None)
        except EngineDeadError as error:
            return error
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._queue.leave(replica.index)

    async def _work(self, replica: ServingReplica) -> EngineDeadError | None:
        """Answers lines one at a time. Returns the error if the replica has stopped."""
        while True:
            try:
                served = await self._serving_app(replica)
            except EngineDeadError as error:
                return error
            job = await self._queue.next(replica.index)
            if job is None:
                return None
            if served.engine.alive:
                await self._answer(replica, served.app, job)
            else:  # the engine was lost while no line was available
                self._queue.give_back(replica.index, job)

    async def _serving_app(self, replica: ServingReplica) -> _ServingApp:
        """Waits until the replica serves. Raises `EngineDeadError`."""
        engine = await replica.serving()
        while not engine.alive:  # the engine was lost, and the replica will notice it soon
            await asyncio.sleep(0)
            engine = await replica.serving()
        known = self._apps.get(replica.index)
        if known is None or known.engine is not engine:
            known = self._apps[replica.index] = _ServingApp(engine, self._make_app(engine))
        return known

    async def _answer(self, replica: ServingReplica, app: ASGIApp, job: Job) -> None:
        while (reply := await post(app, job.line)).busy:
            await asyncio.sleep(BUSY_SECONDS)
        if not reply.transient:
            answer = answer_of(job.line, reply)
        elif self._queue.lose(replica.index, job):
            return
        else:
            message = f"the engine was lost each of the {job.losses} times that this line was run"
            answer = error_answer(job.line, "engine_dead", message)
        self._finish(job.line.number, answer)
        self._queue.finish(replica.index, job)

    def _finish(self, number: int, answer: Answer) -> None:
        self._sink.add(number, answer.kind, answer.line)
        self._watcher.finished(answer)
