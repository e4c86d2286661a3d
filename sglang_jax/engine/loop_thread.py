"""An event loop in a thread, which runs asynchronous code for blocking callers and for other event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from sglang_jax.errors import EngineDeadError

_SHUT_DOWN = "the engine was shut down"

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class GroupSource(Protocol[T_co]):
    """Items in groups, on one event loop. An asynchronous generator would cost a thread switch per item."""

    async def next(self) -> Sequence[T_co] | None:
        """Returns the next group; None after the last."""
        ...

    async def close(self) -> None: ...


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the loop; cancelling the future cancels it. Raises `EngineDeadError` after `close`."""
        with self._lock:  # so that a loop that stops leaves no accepted coroutine behind
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise EngineDeadError(_SHUT_DOWN)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and returns its result. If the wait is interrupted, the coroutine is cancelled. Raises
        `EngineDeadError` if `close` cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            if self._closed:
                raise EngineDeadError(_SHUT_DOWN) from error
            raise
        finally:
            future.cancel()

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Like `run`, from another loop."""
        future, task = self.submit(coroutine), asyncio.current_task()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError as error:
            if self._closed and task is not None and not task.cancelling():
                raise EngineDeadError(_SHUT_DOWN) from error
            raise

    def iterate(self, groups: GroupSource[T]) -> Iterator[T]:
        """Yields the items of groups, at one thread switch per group. Leaving it early closes the groups."""
        iteration = _Iteration(groups)
        try:
            while (group := self.run(iteration.next())) is not None:
                yield from group
        finally:
            with suppress(EngineDeadError):  # the loop has closed them already
                self.run(iteration.close())

    async def iterate_async(self, groups: GroupSource[T]) -> AsyncGenerator[T, None]:
        iteration = _Iteration(groups)
        try:
            while (group := await self.run_async(iteration.next())) is not None:
                for item in group:
                    yield item
        finally:
            with suppress(EngineDeadError):
                await self.run_async(iteration.close())

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Cancels what runs on the loop, and ends the thread."""
        with self._lock:
            self._closed = True  # before anything is cancelled: see `run`
            last = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        last.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Iteration(Generic[T]):
    """Takes groups one at a time; closing waits for a cancelled `next` to end."""

    def __init__(self, groups: GroupSource[T]) -> None:
        self._groups = groups
        self._lock = asyncio.Lock()

    async def next(self) -> Sequence[T] | None:
        async with self._lock:
            return await self._groups.next()

    async def close(self) -> None:
        async with self._lock:
            await self._groups.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
