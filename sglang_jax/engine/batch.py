"""Runs a list of requests through one client, in order, with a bounded number in flight."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing

from sglang_jax.engine.cumulative import CumulativeOutputs, finished_outputs
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput

FLIGHTS_PER_ROW = 4
"""Completions in flight per row of the runner: enough that the scheduler can choose which requests to admit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Requests, which have ids, and their client."""

    client: EngineClient
    requests: Sequence[GenerateInput]
    max_in_flight: int

    async def run(self) -> list[GenerateOutput]:
        """Returns all finished outputs, in the order of the requests; n outputs for a request with n > 1. Raises the
        `RequestError` of the first request that fails; the others are aborted."""
        results: list[list[GenerateOutput]] = [[] for _ in self.requests]

        async def run_one(position: int, offset: int) -> None:
            results[position] = await finished_outputs(self.client, self.requests[position], offset)

        await self.run_all(run_one)
        return [output for outputs in results for output in outputs]

    async def run_all(self, run_one: Callable[[int, int], Awaitable[None]]) -> None:
        """Calls `run_one` with each request's index and its first output's. The first error cancels the others."""
        todo = self._positions()

        async def work() -> None:
            for position, offset in todo:
                await run_one(position, offset)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.num_workers()):
                    workers.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def num_workers(self) -> int:
        most_completions = max((request.sampling.n for request in self.requests), default=1)
        return min(len(self.requests), max(1, self.max_in_flight // most_completions))

    def _positions(self) -> Iterator[tuple[int, int]]:
        offset = 0
        for position, request in enumerate(self.requests):
            yield position, offset
            offset += request.sampling.n


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None = None


class BatchStream:
    """The outputs of all requests of a batch as they grow: `GroupSource` for a `LoopThread`. An output's `index` is its
    position in the result of `Batch.run`."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        # One slot per worker. While a worker waits for a slot, its request collects a larger delta.
        self._ready: asyncio.Queue[GenerateOutput | _End] = asyncio.Queue(maxsize=batch.num_workers())
        self._producer: asyncio.Task[None] | None = None
        self._end: _End | None = None

    async def next(self) -> list[GenerateOutput] | None:
        """Waits for at least one output, and returns all that are ready; None once all have ended. Raises the
        `RequestError` of the first request that fails; the others are aborted."""
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        outputs: list[GenerateOutput] = []
        while self._end is None and not (outputs and self._ready.empty()):
            item = await self._ready.get()
            if isinstance(item, _End):
                self._end = item
            else:
                outputs.append(item)
        if not outputs and self._end is not None and self._end.error is not None:
            raise self._end.error
        return outputs or None

    async def close(self) -> None:
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.wait({self._producer})

    async def _produce(self) -> None:
        try:
            await self._batch.run_all(self._run_one)
        except Exception as error:  # raised where the stream is read
            await self._ready.put(_End(error))
        else:
            await self._ready.put(_End())

    async def _run_one(self, position: int, offset: int) -> None:
        request = self._batch.requests[position]
        outputs = CumulativeOutputs.of(request, offset)
        async with aclosing(self._batch.client.generate(request)) as deltas:
            async for delta in deltas:
                await self._ready.put(outputs.add_good(delta))
