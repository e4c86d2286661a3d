"""Replies that are written in the background: they continue when the client that asked for them leaves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from sglang_jax.errors import RequestError
from sglang_jax.server.errors import BusyError, ShuttingDownError, internal_error
from sglang_jax.server.shutdown import SHUTDOWN, Shutdown
from sglang_jax.server.tracing import current_trace

logger = logging.getLogger(__name__)

MAX_RUNNING_BYTES = 64 * 2**20
MAX_RUNNING_BYTES_EACH = 16 * 2**20
"""Maximum bytes of the conversations of all replies that run, and those that each owner may have in any case."""

MAX_EVENT_BYTES = 64 * 2**20
"""Maximum bytes of all events that are kept for clients that come back; the owner with the most loses its oldest."""

END = b"\n\n"

Save = Callable[[], Awaitable[None]]


class BackgroundWriter(Protocol):
    """What writes a reply: it can also end as failed or cancelled."""

    def failed(self, error: RequestError) -> bytes:
        """Ends the reply with an error, and returns its last events."""
        ...

    def cancel(self) -> None:
        """Ends the reply because somebody asked for that."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    """One reply. `size`: bytes of its conversation, which count while it runs; `events`: those so far, by number; None
    if they are not kept; `cancelled`: somebody asked for its end; `writer`: None after its end, when nothing of its
    request may stay."""

    owner: str
    size: int
    events: list[bytes] | None
    writer: BackgroundWriter | None
    done: bool = False
    cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class BackgroundRuns:
    """All replies that run in the background, and the events of those that have finished, while there is room."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._bytes: Counter[str] = Counter()
        self._with_events: defaultdict[str, dict[str, _Run]] = defaultdict(dict)
        self._running: Counter[str] = Counter()

    def check_room(self, owner: str, size: int) -> None:
        """Raises `BusyError` if another reply, with a conversation of `size` bytes, is too much for the memory."""
        held = self._running.total()
        if held + size > MAX_RUNNING_BYTES and self._running[owner] + size > MAX_RUNNING_BYTES_EACH:
            raise BusyError(
                f"the conversations of responses in the background hold {held} bytes, and {size} more do not fit; the "
                f"limit is {MAX_RUNNING_BYTES}. Try again later"
            )

    def start(
        self,
        run_id: str,
        writer: BackgroundWriter,
        events: AsyncGenerator[bytes, None],
        save: Save,
        *,
        first: bytes,
        keep_events: bool,
        owner: str,
        size: int,
    ) -> None:
        """Starts a reply. `events`: its generator; `first`: events before that; `save`: stores its present state, which
        happens here if it fails or is cancelled; `owner`, `size`: see `check_room`."""
        run = self._runs[run_id] = _Run(owner, size, [] if keep_events else None, writer)
        self._running[owner] += size
        if keep_events:
            self._with_events[owner][run_id] = run
        self._add(run, first)
        run.task = asyncio.create_task(self._drive(run_id, run, writer, events, save))
        if (trace := current_trace()) is not None:
            run.task.add_done_callback(trace.hold())

    async def _drive(
        self, run_id: str, run: _Run, writer: BackgroundWriter, events: AsyncGenerator[bytes, None], save: Save
    ) -> None:
        shutdown = SHUTDOWN.get(None) or Shutdown()
        task = asyncio.current_task()
        assert task is not None
        shutdown.add(task.cancel)
        try:
            await self._write(run, writer, events, save, shutdown)
        finally:
            shutdown.discard(task.cancel)
            run.done, run.task, run.writer = True, None, None
            self._running[run.owner] -= run.size
            run.notify()
            if run.events is None:
                del self._runs[run_id]

    async def _write(
        self, run: _Run, writer: BackgroundWriter, events: AsyncGenerator[bytes, None], save: Save, shutdown: Shutdown
    ) -> None:
        try:
            async with aclosing(events):
                async for written in events:
                    self._add(run, written)
            return
        except asyncio.CancelledError:
            if shutdown.stopped:
                self._add(run, writer.failed(ShuttingDownError("the server was stopped before the reply ended")))
            else:
                writer.cancel()
        except RequestError as error:
            self._add(run, writer.failed(error))
        except Exception as error:  # a fault of the server
            logger.exception("A reply in the background failed")
            self._add(run, writer.failed(internal_error(error)))
        try:
            await save()
        except RequestError as error:
            logger.error("The end of a reply in the background cannot be stored: %s", error.message)

    def _add(self, run: _Run, written: bytes) -> None:
        if run.events is None:
            return
        run.events += [event + END for event in written.split(END) if event]
        self._bytes[run.owner] += len(written)
        while self._bytes.total() > MAX_EVENT_BYTES:
            ((owner, _),) = self._bytes.most_common(1)
            self._drop_events(next(iter(self._with_events[owner])))
        run.notify()

    def _drop_events(self, run_id: str) -> None:
        run = self._runs[run_id]
        self._bytes[run.owner] -= sum(map(len, run.events or ()))
        del self._with_events[run.owner][run_id]
        run.events = None
        run.notify()
        if run.done:
            del self._runs[run_id]

    def running(self, run_id: str) -> BackgroundWriter | None:
        """Returns the writer of a reply that has not ended; else None."""
        run = self._runs.get(run_id)
        return None if run is None else run.writer

    def has_events(self, run_id: str) -> bool:
        return run_id in self._runs and self._runs[run_id].events is not None

    def events(self, run_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Returns the events of a reply that `has_events`, from number `after` + 1 on, until it ends. They raise
        `RequestError` if they make room for others meanwhile."""
        return _events(self._runs[run_id], after + 1)

    async def cancel(self, run_id: str) -> None:
        """Ends a reply, if it runs, and waits until it has ended."""
        run = self._runs.get(run_id)
        if run is None or run.task is None:
            return
        if not run.cancelled:  # a second time would interrupt the end itself, before it is stored
            run.cancelled = True
            run.task.cancel()
        await asyncio.wait({run.task})

    def forget(self, run_id: str) -> None:
        """Drops the events of a reply that has ended."""
        if self.has_events(run_id):
            self._drop_events(run_id)


async def _events(run: _Run, number: int) -> AsyncGenerator[bytes, None]:
    number = max(number, 0)
    while True:
        if run.events is None:
            raise RequestError("the events of this response made room for others; retrieve it without stream")
        new = run.events[number:]
        if not new and run.done:
            return
        if not new:
            await run.changed.wait()
            continue
        number += len(new)
        yield b"".join(new)
