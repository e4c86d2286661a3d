"""The end of a drain: ends requests that are still in flight, with an error that says that the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.errors import ShuttingDownError


class Shutdown:
    """The running work of requests, which `stop` ends. All methods run on one event loop."""

    def __init__(self) -> None:
        self.stopped = False
        self._ends: set[Callable[[], object]] = set()

    def stop(self) -> None:
        """Ends all running work, and later work at once."""
        self.stopped = True
        for end in list(self._ends):
            end()

    def add(self, end: Callable[[], object]) -> None:
        """Adds a function that `stop` calls to end work, such as a task's `cancel`; until `discard`."""
        self._ends.add(end)
        if self.stopped:
            end()

    def discard(self, end: Callable[[], object]) -> None:
        self._ends.discard(end)

    def check(self, work: asyncio.Future[Any]) -> None:
        """Raises `ShuttingDownError` if `stop` has cancelled this work."""
        if self.stopped and work.cancelled():
            raise ShuttingDownError("the server is shutting down, and the request did not finish in time")


SHUTDOWN: ContextVar[Shutdown] = ContextVar("shutdown")
"""The shutdown of the current request's server; not set if no server can stop it."""


class Stoppable:
    def __init__(self, app: ASGIApp, shutdown: Shutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        SHUTDOWN.set(self._shutdown)  # only for this request: uvicorn creates a task for each
        await self._app(scope, receive, send)
