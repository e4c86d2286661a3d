"""Limits for the size of request bodies, for the time to receive them, and for the memory of unfinished ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_jax.errors import RequestError, cut
from sglang_jax.logs import OnceASecond
from sglang_jax.server.callers import caller_name
from sglang_jax.server.errors import (
    BodyTooLargeError,
    BusyError,
    ClientTooSlowError,
    MediaTypeError,
    ShuttingDownError,
    close_after_error,
    error_response,
)
from sglang_jax.server.shutdown import SHUTDOWN, Shutdown

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())


BODIES_IN_FLIGHT = 8
"""The bodies in flight together may have as many bytes as this many of the largest."""

SMALL_BODY = 65_536
"""Bodies of at most this many bytes are read even if larger ones use up the limit."""

MAX_SMALL_BODIES_BYTES = 40 * 2**20
"""Maximum bytes of all small incomplete bodies together: more than `REQUEST_BYTES` of 4096 connections, whose bodies
may have come and wait to be read."""

REQUEST_BYTES = 8192
"""Memory of a request whose body is incomplete, counted in addition to the body's bytes."""

MIN_BYTES_PER_SECOND = 16_384
"""Bytes per second that a client must send on average after the first `client_timeout` seconds."""


@dataclass(slots=True, eq=False)
class _Share:
    """The bytes of one request's body. `deadline`: set while more is awaited; `refusal`: its error, if refused."""

    tenant: str
    size: int = 0
    deadline: asyncio.Timeout | None = None
    refusal: RequestError | None = None

    def refuse(self, error: RequestError) -> None:
        """Refuses the body without waiting for the rest."""
        self.refusal = error
        if self.deadline is not None and not self.deadline.expired():
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def refuse_at_shutdown(self) -> None:
        self.refuse(ShuttingDownError(f"the server is shutting down, and of the body only {self.size} bytes came"))


class BodyLimit:
    """Reads each body completely before the application sees the request; refuses bodies that are too large or slow.
    Bytes are counted over all requests, because a request keeps its body while it runs; but each tenant has room for
    one body of maximum size, however much others hold. `streamed`: method and path of routes that read their bodies as
    they arrive, within their own limits."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        client_timeout: float,
        streamed: Collection[tuple[str, str]] = (),
    ) -> None:
        self._app = app
        self._streamed = frozenset(streamed)
        self._most = max_body_bytes
        self._patience = client_timeout
        self._held = 0
        self._held_of: Counter[str] = Counter()
        self._small = PartialRequests(MAX_SMALL_BODIES_BYTES, "small bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            error = MediaTypeError(
                f"a body with Content-Encoding: {cut(encoding)} cannot be read: send it uncompressed"
            )
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if self._streamed and (scope["method"], scope["path"]) in self._streamed:
            await self._app(scope, receive, send)
            return
        share = _Share(caller_name())
        try:
            try:
                message = await self._read(headers, receive, share)
            except RequestError as error:
                self._hold(share, -share.size)
                await close_after_error(error, scope, receive, send)
                return
            unread = [message]

            async def replay() -> Message:
                return unread.pop() if unread else await receive()

            await self._app(scope, replay, send)
        finally:
            self._hold(share, -share.size)
            share.refusal = None  # its traceback keeps the share and its body alive

    async def _read(self, headers: Headers, receive: Receive, share: _Share) -> Message:
        """Returns a message with the complete body, or the client's disconnect. Raises `RequestError`."""
        length = headers.get("content-length", "")
        announced = int(length) if length.isdecimal() else 0
        self._check(share, announced, 0)
        chunks: list[bytes] = []
        begin = asyncio.get_running_loop().time()
        shutdown = SHUTDOWN.get(None) or Shutdown()
        shutdown.add(share.refuse_at_shutdown)
        try:
            self._small.hold(share, REQUEST_BYTES)
            while True:
                message = await self._next(receive, share, begin + self._patience + share.size / MIN_BYTES_PER_SECOND)
                if message["type"] != "http.request":
                    return message
                chunk: bytes = message.get("body", b"")
                size = max(announced, share.size + len(chunk))
                self._check(share, size, len(chunk))
                chunks.append(chunk)
                self._hold(share, len(chunk))
                if not message.get("more_body", False):
                    return {"type": "http.request", "body": b"".join(chunks), "more_body": False}
                self._small.hold(share, REQUEST_BYTES + (share.size if size <= SMALL_BODY else 0))
                if share.refusal is not None:
                    raise share.refusal
        except TimeoutError as error:
            raise ClientTooSlowError(
                f"{share.size} bytes of the body arrived in {asyncio.get_running_loop().time() - begin:.1f} s; the "
                "limit "
                f"is {self._patience:g} s without data (--client-timeout), then {MIN_BYTES_PER_SECOND} bytes/s"
            ) from error
        finally:
            shutdown.discard(share.refuse_at_shutdown)
            self._small.hold(share, 0)
            chunks.clear()

    async def _next(self, receive: Receive, share: _Share, until: float) -> Message:
        """Returns the next part of a body. Raises `TimeoutError`, and the error of a refusal."""
        try:
            async with asyncio.timeout_at(until) as share.deadline:
                message = await receive()
        except TimeoutError:
            if share.refusal is not None:
                raise share.refusal from None
            raise
        finally:
            share.deadline = None
        if share.refusal is not None:
            raise share.refusal
        return message

    def _hold(self, share: _Share, more: int) -> None:
        share.size += more
        self._held += more
        self._held_of[share.tenant] += more
        if not self._held_of[share.tenant]:
            del self._held_of[share.tenant]

    def _check(self, share: _Share, size: int, more: int) -> None:
        """Checks that a body of `size` bytes, `more` of them new, fits. Raises `BodyTooLargeError`, `BusyError`."""
        if size > self._most:
            raise BodyTooLargeError(f"the body has at least {size} bytes; the limit is {self._most} (--max-body-bytes)")
        limit = BODIES_IN_FLIGHT * self._most
        full = self._held + more > limit and self._held_of[share.tenant] + more > self._most
        if full and size > SMALL_BODY:
            raise BusyError(
                f"the bodies of requests in flight hold {self._held} bytes, and {more} more do not fit; the limit is "
                f"{limit} ({BODIES_IN_FLIGHT} times --max-body-bytes). Try again later"
            )


class PartialRequest(Protocol):
    """A request, or the head of one, that has arrived only in part."""

    def refuse(self, error: RequestError) -> None:
        """Answers with this error, and discards what has arrived."""
        ...


class PartialRequests:
    """Bounds the bytes of partial requests over all connections together. `what`: these, in the plural, for errors.

    Above `most` bytes, it refuses the oldest of those that are at least half as long as the average. A client that
    sends without pauses has finished before that, however many others are silent, and one that has sent little frees
    little. All methods run on one event loop.
    """

    def __init__(self, most: int, what: str) -> None:
        self.num_bytes = 0
        self._most = most
        self._what = what
        self._sizes: dict[PartialRequest, int] = {}

    def hold(self, request: PartialRequest, size: int) -> None:
        """Sets the bytes that a partial request holds now: 0 once it is complete or its client has left."""
        before = self._sizes.get(request, 0)
        if size:
            self._sizes[request] = size
        elif before:
            del self._sizes[request]
        self.num_bytes += size - before
        while self.num_bytes > self._most:
            least = self.num_bytes / len(self._sizes) / 2
            oldest = next(request for request, length in self._sizes.items() if length >= least)
            length = self._sizes.pop(oldest)
            held, self.num_bytes = self.num_bytes, self.num_bytes - length  # `refuse` calls `hold(..., 0)`
            logger.warning(
                "Refused a request of which %d bytes had come: %d bytes of unfinished %s are held",
                length,
                held,
                self._what,
            )
            oldest.refuse(
                BusyError(
                    f"the unfinished {self._what} of all requests hold {held} bytes, this one {length}; the "
                    f"limit is {self._most}. Send it without pauses, or try again later"
                )
            )
