"""An engine that answers lines from any number of threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp

from sglang_jax.batch.answers import Answer, answer_of, error_answer, post
from sglang_jax.batch.lines import BadLine, Line
from sglang_jax.batch.work_queue import Job, WorkQueue
from sglang_jax.config import ServerConfig
from sglang_jax.engine.batch import FLIGHTS_PER_ROW
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_engine
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.engine.loop_thread import LoopThread
from sglang_jax.engine.replica import Backoff, Replica
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.callers import Callers

WINDOW_BYTES = 256 * 2**20
"""Capacity for waiting lines. Callers hold them in memory anyway, so it only has to be large enough."""

Launch = Callable[[ServerConfig], Awaitable[AsyncEngineClient]]


@dataclass(slots=True)
class _Served:
    """An engine, and its application."""

    engine: AsyncEngineClient
    app: ASGIApp


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How lines are sent to the engine.

    - `max_retries`: see `WorkQueue`.
    - `lookahead`: number of waiting lines to search for shared prefixes.
    - `reorder`: False sends lines in the order of arrival.
    """

    max_retries: int = 3
    lookahead: int = 4096
    reorder: bool = True


class LineEngine(Protocol):
    """Answers lines."""

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """Returns the answers, in order. May be called from many threads; lines in progress have unique numbers. Raises
        `EngineDeadError` if the engine is lost for good."""
        ...


class LocalEngine:
    """Answers lines with an engine whose core is a separate process. A lost engine is restarted, and its lines are
    retried.

    **Arguments:**

    - `launch`: starts the engine; for tests and other cores.
    - `backoff`: how it is restarted.

    **Raises:** `ConfigError`, `CheckpointError`, `EngineDeadError` if the engine does not start.
    """

    def __init__(
        self,
        config: ServerConfig,
        asking: Asking,
        *,
        launch: Launch = launch_engine,
        backoff: Backoff | None = None,
    ) -> None:
        self._config = config
        self._queue = WorkQueue(Lookahead(asking.lookahead, WINDOW_BYTES, reorder=asking.reorder), asking.max_retries)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._served_now: _Served | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._end: BaseException | None = None
        self._loop = LoopThread("sglang-jax-batch")
        self._replica: Replica[AsyncEngineClient] = Replica(0, lambda: launch(config), backoff=backoff)
        try:
            self._loop.run(self._start())
        except BaseException:
            self._loop.close()
            raise

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `LineEngine`."""
        return self._loop.run(self._answer_all(lines))

    def close(self) -> None:
        """Ends the engine; lines in progress fail with `EngineDeadError`."""
        self._loop.run(self._replica.close())
        self._loop.close()

    async def _start(self) -> None:
        await self._replica.start()
        rows = self._replica.client.max_running_requests
        self._workers = [asyncio.create_task(self._work()) for _ in range(FLIGHTS_PER_ROW * rows)]
        for worker in self._workers:
            worker.add_done_callback(self._on_end)

    async def _answer_all(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        if self._end is not None:
            raise self._end
        good = [line for line in lines if isinstance(line, Line)]
        for line in good:
            self._waiting[line.number] = asyncio.get_running_loop().create_future()
            self._queue.push(line)
        self._queue.wake()
        answers = await asyncio.gather(*(self._waiting[line.number] for line in good))
        of_number = dict(zip((line.number for line in good), answers, strict=True))
        return [
            of_number[line.number] if isinstance(line, Line) else error_answer(line, line.code, line.message)
            for line in lines
        ]

    async def _work(self) -> None:
        """Answers lines one at a time. Raises `EngineDeadError` once the replica has stopped."""
        index = self._replica.index
        while True:
            served = await self._served()
            job = await self._queue.next(index)
            assert job is not None  # the input never ends
            if served.engine.alive:
                await self._ask(served.app, job)
            else:
                self._queue.give_back(index, job)

    async def _served(self) -> _Served:
        """Waits until the engine serves. Raises `EngineDeadError` if the replica has stopped."""
        engine = await self._replica.serving()
        while not engine.alive:  # the engine was lost, and the replica will notice it soon
            await asyncio.sleep(0)
            engine = await self._replica.serving()
        if self._served_now is None or self._served_now.engine is not engine:
            context = create_context(engine, self._config, Callers.in_process())
            self._served_now = _Served(engine, create_app(context))
        return self._served_now

    async def _ask(self, app: ASGIApp, job: Job) -> None:
        index, line = self._replica.index, job.line
        reply = await post(app, line)
        if not reply.transient:
            answer = answer_of(line, reply)
        elif self._queue.lose(index, job):
            return
        else:
            message = f"the engine was lost each of the {job.losses} times that this line was run"
            answer = error_answer(line, "engine_dead", message)
        self._queue.finish(index, job)
        self._waiting.pop(line.number).set_result(answer)

    def _on_end(self, worker: asyncio.Task[None]) -> None:
        """Passes a worker's error to all waiting lines, which would otherwise wait forever."""
        if worker.cancelled() or self._end is not None:
            return
        self._end = worker.exception()
        assert self._end is not None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._end)
