"""Runs any number of items through one client: holds a bounded number of them, and returns a result for each."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_jax.engine.cumulative import finished_outputs
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.engine.loop_thread import LoopThread
from sglang_jax.engine.types import EngineClient, GenerateInput, GenerateOutput
from sglang_jax.errors import EngineDeadError, RequestError

Item = str | Sequence[int] | Mapping[str, Any]
"""A prompt as text or token ids; or a mapping with `prompt` or `messages`, and further fields of a request."""

GATHER_SECONDS = 0.05
"""Seconds that the first items are held back, so that there are several to choose from even if the iterable is slow."""

WINDOW_BYTES = 64 * 2**20
"""The window counts as full from this size of its prompts on."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of `item`, the one at `index` (from 0): its n finished `outputs`, or an `error`."""

    index: int
    item: Item
    outputs: list[GenerateOutput] = field(default_factory=list)
    error: RequestError | None = None

    @property
    def text(self) -> str:
        """The first output's text. Raises `error` if it is set."""
        if self.error is not None:
            raise self.error
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class _Pending:
    index: int
    item: Item
    request: GenerateInput


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`in_flight`: items that the engine has; `lookahead`: waiting items to choose from."""

    in_flight: int
    lookahead: int

    @property
    def held(self) -> int:
        """Maximum items that were read and whose results were not taken yet."""
        return self.in_flight + self.lookahead


class ItemStream:
    """Answers the items of an iterable, which is read in the thread that iterates over the results.

    - `convert`: makes the request of an item; a `RequestError` that it raises is the item's error.
    - `ordered`: return results in the order of the items, otherwise as they finish.
    - `reorder`: run prompts that share a prefix one after the other.
    """

    def __init__(
        self,
        loop: LoopThread,
        client: EngineClient,
        convert: Callable[[Item], GenerateInput],
        limits: StreamLimits,
        *,
        ordered: bool,
        reorder: bool,
    ) -> None:
        self._loop = loop
        self._client = client
        self._convert = convert
        self._limits = limits
        self._ordered = ordered
        self._window: Lookahead[_Pending] = Lookahead(limits.held, WINDOW_BYTES, reorder=reorder)
        self._window_lock = threading.Lock()
        self._places = asyncio.Semaphore(limits.in_flight)
        self._gathered = asyncio.Event()
        self._ready: queue.SimpleQueue[BatchResult | BaseException] = queue.SimpleQueue()
        self._running: set[concurrent.futures.Future[None]] = set()

    def run(self, items: Iterable[Item]) -> Iterator[BatchResult]:
        """Yields one result per item; leaving the iteration aborts running requests. Raises what `items` raises, and
        `EngineDeadError` if the engine is lost or shut down."""
        source = enumerate(items)
        waiting: dict[int, BatchResult] = {}
        held = given = 0
        more = True
        try:
            while True:
                while more and held < self._limits.held and not self._window.full and self._ready.empty():
                    entry = next(source, None)
                    if entry is None:
                        more = False
                        self._start(self._end_gathering(0.0))
                    else:
                        self._add(*entry, first=not held and not given)
                        held += 1
                if not held:
                    return
                result = self._next_ready()
                waiting[result.index] = result
                while (index := given if self._ordered else result.index) in waiting:
                    held -= 1
                    given += 1
                    yield waiting.pop(index)
        finally:
            for running in list(self._running):
                running.cancel()

    def _next_ready(self) -> BatchResult:
        result = self._ready.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _add(self, index: int, item: Item, *, first: bool) -> None:
        try:
            request = self._convert(item)
        except RequestError as error:
            self._ready.put(BatchResult(index, item, error=error))
            return
        key = prompt_key(request)
        with self._window_lock:
            self._window.push(_Pending(index, item, request), key=key, number=index, size=2 * len(key))
        if first:
            self._start(self._end_gathering(GATHER_SECONDS))
        elif index == self._limits.lookahead:
            self._start(self._end_gathering(0.0))
        self._start(self._answer_one())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        running = self._loop.submit(work)
        self._running.add(running)
        running.add_done_callback(self._on_end)

    def _on_end(self, ended: concurrent.futures.Future[None]) -> None:
        self._running.discard(ended)
        if ended.cancelled():
            self._ready.put(EngineDeadError("the engine was shut down"))
        elif (error := ended.exception()) is not None:
            self._ready.put(error)

    async def _end_gathering(self, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        self._gathered.set()

    async def _answer_one(self) -> None:
        """Answers the next item of the window. It is called once per item."""
        await self._gathered.wait()
        async with self._places:
            with self._window_lock:
                pending = self._window.take()
            assert pending is not None
            self._ready.put(await self._answer(pending))

    async def _answer(self, pending: _Pending) -> BatchResult:
        try:
            outputs = await finished_outputs(self._client, pending.request)
        except EngineDeadError:
            raise
        except RequestError as error:
            return BatchResult(pending.index, pending.item, error=error)
        return BatchResult(pending.index, pending.item, outputs)


def prompt_key(request: GenerateInput) -> bytes:
    """Returns a key that shares a prefix with those of prompts that do. Empty for invalid ids, refused later."""
    if isinstance(request.prompt, str):
        return request.prompt.encode(errors="surrogatepass")
    try:
        return np.asarray(request.prompt, ">i8").tobytes()
    except (TypeError, ValueError, OverflowError):
        return b""
