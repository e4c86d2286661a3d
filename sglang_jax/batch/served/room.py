"""How many lines of all batches run at once, and of one caller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.callers import Caller, set_caller

SHARE_LEFT = 0.5
"""A line starts only while this share of its caller's tokens per minute is left for the caller's other requests."""

LEARNING = 0.1
"""Weight of the last line in the expected tokens of the next."""


class CallerRoom:
    """Lets a caller's lines start one after the other, as its limits allow. `caller`: the one in the background.

    `max_concurrent`: as many lines run. `tokens_per_minute`: lines are charged like all requests, but a line starts
    only when half would be left after the lines in flight and itself have used what lines use on average. Before the
    first has ended, that is half, so the first line runs by itself.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._running = 0
        self._learnt = False
        self._expected = 0.0 if caller.tokens is None else caller.tokens.per_minute * SHARE_LEFT
        self._first_in_line = asyncio.Lock()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """Waits until a line may start; it runs while the context is open."""
        async with self._first_in_line:
            while (wait := self._seconds_to_wait()) != 0.0:
                self._ended.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), wait)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.set()

    def learn(self, tokens: int) -> None:
        """Notes the tokens of a line that has ended."""
        self._expected += (tokens - self._expected) * (LEARNING if self._learnt else 1.0)
        self._learnt = True

    def _seconds_to_wait(self) -> float | None:
        """None: until a line ends."""
        most, tokens = self.caller.max_concurrent, self.caller.tokens
        if most is not None and self._running >= most:
            return None
        if tokens is None:
            return 0.0
        left = tokens.per_minute * SHARE_LEFT
        needed = self._expected * (self._running + 1)
        if not self._running:  # a line that needs more than there ever is runs by itself
            needed = min(needed, tokens.per_minute - left)
        return tokens.seconds_to_wait(left + needed)


class LineApp:
    """The server's routes for the lines of one caller's batches. `lines`: those of all callers that may run at once."""

    def __init__(self, routes: ASGIApp, room: CallerRoom, lines: asyncio.Semaphore) -> None:
        self._routes = routes
        self._room = room
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._room.line(), self._lines:
            set_caller(self._room.caller)
            await self._routes(scope, receive, send)
