"""The end of a drain: requests that are still in flight are told that the server stops."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.errors import ShuttingDownError


class Shutdown:
    """The work of requests, which `stop` ends. All methods run on one event loop."""

    def __init__(self) -> None:
        self.stopped = False
        self._work: set[asyncio.Future[Any]] = set()

    def stop(self) -> None:
        """Cancels all work, and what comes from now on as it begins."""
        self.stopped = True
        for work in self._work:
            work.cancel()

    def add(self, work: asyncio.Future[Any]) -> None:
        """Work that `stop` cancels; until `discard`."""
        self._work.add(work)
        if self.stopped:
            work.cancel()

    def discard(self, work: asyncio.Future[Any]) -> None:
        self._work.discard(work)

    def check(self, work: asyncio.Future[Any]) -> None:
        """Raises `ShuttingDownError` if `stop` has cancelled this work."""
        if self.stopped and work.cancelled():
            raise ShuttingDownError("the server is shutting down, and the request did not finish in time")


SHUTDOWN: ContextVar[Shutdown] = ContextVar("shutdown")
"""That of the server that has the current request; not set where no server can stop it."""


class Stoppable:
    """Lets `shutdown` end the requests of an application."""

    def __init__(self, app: ASGIApp, shutdown: Shutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        SHUTDOWN.set(self._shutdown)  # the task is this request's own: uvicorn makes one for each
        await self._app(scope, receive, send)
