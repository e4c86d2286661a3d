"""Many prompts through one client: in order, with a bounded number in flight."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing

from sglang_jax.engine.cumulative import cumulative_outputs
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput

FLIGHTS_PER_ROW = 4
"""Completions in flight for each row of the runner: enough that the scheduler can choose whom to admit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Requests, and how many completions may be in flight at once."""

    client: EngineClient
    requests: Sequence[GenerateInput]
    max_in_flight: int

    async def run(self) -> list[GenerateOutput]:
        """All outputs, finished, in the order of the requests; n of them for a request with n > 1.

        **Raises:** the first request's `RequestError`; the others are aborted.
        """
        results: list[list[GenerateOutput]] = [[] for _ in self.requests]

        async def run_one(position: int, offset: int) -> None:
            outputs = [output async for output in cumulative_outputs(self.client, self.requests[position], offset)]
            results[position] = sorted(outputs, key=lambda output: output.index)

        await self._run_all(run_one)
        return [output for outputs in results for output in outputs]

    async def stream(self) -> AsyncGenerator[list[GenerateOutput], None]:
        """Outputs of all requests as they grow: each time all that are ready, of which there is at least one.

        An output's `index` is the place that its completion has in what `run` returns.
        """
        # A place for each worker: whoever cannot put its output here lets its request gather more.
        ready: asyncio.Queue[GenerateOutput | Exception | None] = asyncio.Queue(maxsize=self._num_workers())

        async def run_one(position: int, offset: int) -> None:
            async with aclosing(cumulative_outputs(self.client, self.requests[position], offset)) as outputs:
                async for output in outputs:
                    await ready.put(output)

        async def produce() -> None:
            try:
                await self._run_all(run_one)
            except Exception as error:  # raised where the stream is read
                await ready.put(error)
            else:
                await ready.put(None)

        producer = asyncio.create_task(produce())
        try:
            while True:
                items = [await ready.get()]
                while not ready.empty():
                    items.append(ready.get_nowait())
                outputs = [item for item in items if isinstance(item, GenerateOutput)]
                if outputs:
                    yield outputs
                match items[-1]:
                    case None:
                        return
                    case Exception() as error:
                        raise error
        finally:
            producer.cancel()
            await asyncio.wait({producer})

    async def _run_all(self, run_one: Callable[[int, int], Awaitable[None]]) -> None:
        todo = self._positions()

        async def work() -> None:
            for position, offset in todo:
                await run_one(position, offset)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._num_workers()):
                    workers.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _positions(self) -> Iterator[tuple[int, int]]:
        """Each request's place among the requests, and its first completion's place among the outputs."""
        offset = 0
        for position, request in enumerate(self.requests):
            yield position, offset
            offset += request.sampling.n

    def _num_workers(self) -> int:
        most_completions = max((request.sampling.n for request in self.requests), default=1)
        return min(len(self.requests), max(1, self.max_in_flight // most_completions))
