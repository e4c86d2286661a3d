"""Limits of connections: how many may be open, and how long and how much each may keep the server waiting.

uvicorn and httptools, in C, read requests. Crowds of hostile connections are the work of a reverse proxy: see
`docs/security.md`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
import weakref
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sglang_jax.errors import RequestError
from sglang_jax.logs import OnceASecond
from sglang_jax.server.auth import OPEN_PATHS
from sglang_jax.server.error_shapes import openai_error
from sglang_jax.server.errors import LINGER_SECONDS, TooManyConnectionsError, close_after_error
from sglang_jax.server.held_answers import HeldAnswers, share_limit

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MAX_HEAD_BYTES = 32_768
"""Maximum bytes of a request's head, and of what arrives without completing a head or a part of a body: the parser
holds headers after a body, too."""

MAX_HEAD_LINES = 128
"""Maximum headers of a request, those after its body included."""

MAX_PIPELINED = 64
"""Maximum requests of a connection that are not answered yet. Each holds some kilobytes."""

HEALTH_CONNECTIONS = 64
"""Connections above `max_connections`, open only for health checks: a full server must not seem dead."""

IDLE_SECONDS = 1.0
"""A connection is not closed for a new one before it has been silent for this long: a request may be on its way."""

MAX_LINGERING = 128
"""Maximum refused connections that linger at once; above that, the oldest is closed."""

SPARE_DESCRIPTORS = 384
"""File descriptors in addition to `max_connections`: health checks, lingering closes, the engine's sockets, files."""

_CONNECTION = "sglang_jax.connection"
"""The key in ASGI's `state` of a weak reference to the request's connection."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    client_timeout: float


@dataclass(slots=True)
class ConnectionGroup:
    """What the connections of a server share. `waiting`: those without a request, longest waiting first; `served`:
    those with one that is not a health check; `lingering`: those that were refused and are still open, oldest first."""

    limits: ConnectionLimits
    waiting: dict[BoundedConnection, None] = field(default_factory=dict)
    served: set[BoundedConnection] = field(default_factory=set)
    lingering: dict[BoundedConnection, None] = field(default_factory=dict)
    held: HeldAnswers = field(default_factory=HeldAnswers)

    def longest_waiting(self) -> BoundedConnection | None:
        return next(iter(self.waiting), None)


def bounded_connections(limits: ConnectionLimits) -> type[HttpToolsProtocol]:
    """Returns a class of connections for uvicorn that share these limits."""
    group = ConnectionGroup(limits)

    class Connection(BoundedConnection):
        def __init__(
            self,
            config: uvicorn.Config,
            server_state: ServerState,
            app_state: Mapping[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(group, config, server_state, app_state, _loop)

    return Connection


class UpgradeIgnored(httptools.HttpRequestParser):
    """A parser that reads a request with `Upgrade: h2c` or the like as any other. httptools' own skips its body, which
    it takes for another protocol: the body was lost, or read as requests that no proxy had seen."""

    def __init__(self, connection: BoundedConnection) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's, for pipelined requests
        self._connection = connection

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        while data:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                (end_of_head,) = upgrade.args
                data = self._connection.head_without_upgrade() + bytes(data[end_of_head:])


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits for the time and memory that a client may take. Its application must be a
    `ConnectionGate`.

    - A client has `client_timeout` to send the whole head of a request, from the connection's start or the head's first
      byte. uvicorn itself closes connections that are idle between two requests.
    - A client that reads nothing for `client_timeout`, while 64 KiB of an answer or its end are waiting, is cut off.
      Until then, uvicorn's write buffer holds 64 KiB and one event, and the engine is not asked for more. For long
      complete answers, `HeldAnswers` has a limit.
    - If `max_connections` are open, a new connection replaces the one that has been idle longest, for at least
      `IDLE_SECONDS`. If none is idle, `HEALTH_CONNECTIONS` more may be open. If those are open as well, the one that
      has waited longest is refused with 503, or else the new one.
    - If `max_connections` have a request, those of others are refused with 503, except health checks. So silent
      connections do not keep clients out, and clients do not keep health checks out.
    """

    def __init__(
        self,
        group: ConnectionGroup,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: Mapping[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # A strong reference would be a cycle, whose memory only the garbage collector frees.
        super().__init__(config, server_state, {**app_state, _CONNECTION: weakref.ref(self)}, _loop)
        self.parser = UpgradeIgnored(self)
        self._group = group
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._num_unparsed = 0
        self._in_head = False
        self._head_bytes = 0
        self._head_lines = 0
        self._refusal: RequestError | None = None
        self._is_refused = False
        self._waits_since = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # -- asyncio's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Makes room for the connection, or refuses it."""
        super().connection_made(transport)
        if not self._make_room():
            self._refuse(self._too_many())
            return
        self._wait()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._unanswered:
            self._wait()
            self._expect_head()
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(head_too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._end_head_timer()
        self._end_unread_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()  # uvicorn's waits for its time if the client reset the connection
        self.end_requests()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The transport closes once the client has read what is written."""
        self.end_requests()
        self._expect_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread_timer()

    # -- httptools' callbacks. An exception ends the request with `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._head_lines = 0
        if len(self._unanswered) >= MAX_PIPELINED:
            raise RequestError(f"{len(self._unanswered)} requests are unanswered; the limit is {MAX_PIPELINED}")

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        self._head_lines += 1
        if self._head_lines > MAX_HEAD_LINES:
            self._refusal = head_too_large()
            raise self._refusal
        if self._in_head:  # uvicorn would add those after a body to the head, where a proxy may not have allowed them
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = head_too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise RequestError("CONNECT is for proxies")
        if self.parser.should_upgrade():  # `UpgradeIgnored` reads the head again
            return
        super().on_headers_complete()
        self._in_head = False
        self._unanswered.append(self.cycle)
        self._num_unparsed = 0
        self._group.waiting.pop(self, None)
        self._end_head_timer()
        if not self.flow.write_paused:
            self._end_unread_timer()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_unparsed = 0
        super().on_message_complete()

    # -- uvicorn's

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self.transport.is_closing():
            self.end_requests()
        if self._unanswered:
            return
        self._group.served.discard(self)
        self._expect_reader()
        if not self.transport.is_closing():
            self._wait()
            if self._in_head:
                self._expect_head()

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP with the error object of all errors."""
        refusal, self._refusal = self._refusal, None  # its traceback keeps the connection alive
        self._refuse(refusal or RequestError(msg, code="malformed_http"))

    def head_without_upgrade(self) -> bytes:
        """Returns the head that was read last, for the parser to read again."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*head, b"", b""])

    def end_requests(self) -> None:
        """Tells the application that the client of all requests has left. uvicorn tells it only of the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.on_response = lambda: None  # otherwise, requests that have not started keep the connection
        self._unanswered.clear()

    # -- limits

    def _make_room(self) -> bool:
        """Whether a new connection may stay: there is room, it replaces another one, or it is for health checks."""
        limit, waiting = self._group.limits.max_connections, self._group.longest_waiting()
        if len(self.connections) <= limit:
            return True
        if waiting is not None and time.monotonic() - waiting._waits_since > IDLE_SECONDS:
            waiting.drop()
            return True
        if len(self.connections) <= limit + HEALTH_CONNECTIONS:
            return True
        if waiting is not None:
            waiting._refuse(self._too_many())
        return waiting is not None

    def serve(self) -> None:
        """Counts the connection as served until it has no request. Raises `TooManyConnectionsError` if
        `max_connections` others are served."""
        if self not in self._group.served and len(self._group.served) >= self._group.limits.max_connections:
            raise self._too_many()
        self._group.served.add(self)

    def share_limit(self, scope: Scope) -> None:
        """Lets the answer to a request share the limit of long answers."""
        share_limit(scope, self._group.held, self.transport.abort)

    def unless_closing(self, send: Send) -> Send:
        """Returns a `send` for answers, which uvicorn would write for a moment after the connection was closed."""

        async def send_unless_closing(message: Message) -> None:
            if self.transport.is_closing():
                self.end_requests()
            await send(message)

        return send_unless_closing

    def drop(self) -> None:
        """Closes a connection without a request."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        """The connection no longer counts as open."""
        self._group.waiting.pop(self, None)
        self._group.served.discard(self)
        self._group.lingering.pop(self, None)
        self.connections.discard(self)

    def _too_many(self) -> RequestError:
        return TooManyConnectionsError(
            f"{len(self.connections)} connections are open and busy; the limit is "
            f"{self._group.limits.max_connections} (--max-connections). Try again later"
        )

    def _refuse(self, error: RequestError) -> None:
        """Answers with this error, and closes once the client does, at the latest after `LINGER_SECONDS`. A request
        that is being answered loses its answer, which cannot be told from the error."""
        self._is_refused = True
        self._leave()
        self._end_head_timer()
        if self._unanswered or self.transport.is_closing():
            self.end_requests()
            self.transport.abort()
            return
        content = msgspec.json.encode(openai_error(error))
        lines = [f"HTTP/1.1 {error.status} {error.code}", "Content-Type: application/json", "Connection: close"]
        lines += [f"Content-Length: {len(content)}"] + (["Retry-After: 1"] if error.status == 503 else [])
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._group.lingering[self] = None
        if len(self._group.lingering) > MAX_LINGERING:
            next(iter(self._group.lingering)).drop()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.drop)

    def _wait(self) -> None:
        """Notes that the connection waits for a request from now on, or for the rest of its head."""
        self._group.waiting.pop(self, None)
        self._group.waiting[self] = None
        self._waits_since = time.monotonic()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._group.limits.client_timeout, self.drop)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reader(self) -> None:
        """Expects that the client reads within `client_timeout`, if bytes are waiting for it."""
        self._end_unread_timer()
        if unread := self.transport.get_write_buffer_size():
            self._unread_timer = self.loop.call_later(self._group.limits.client_timeout, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        still = self.transport.get_write_buffer_size()
        if still < unread:
            self._expect_reader()
            return
        self._unread_timer = None
        logger.warning(
            "Closed a connection whose client read nothing for %g s (--client-timeout): %d bytes were unread",
            self._group.limits.client_timeout,
            still,
        )
        self.transport.abort()

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


class ConnectionGate:
    """Refuses requests while `max_connections` others have one, except health checks. With connections of another
    server, there is no limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reference = scope.get("state", {}).get(_CONNECTION)
        connection: BoundedConnection | None = None if reference is None else reference()
        if connection is not None:
            send = connection.unless_closing(send)
            connection.share_limit(scope)
            if scope["path"] not in OPEN_PATHS:
                try:
                    connection.serve()
                except TooManyConnectionsError as error:
                    await close_after_error(error, scope, receive, send)
                    return
        await self._app(scope, receive, send)


def head_too_large() -> RequestError:
    refusal = RequestError(
        f"the head of the request is too large; the limit is {MAX_HEAD_BYTES} bytes, in {MAX_HEAD_LINES} lines"
    )
    refusal.status, refusal.code = 431, "head_too_large"
    return refusal


def raise_descriptor_limit(max_connections: int) -> int:
    """Raises the limit of open files, within the hard limit, for this many connections. Returns how many fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    fitting = max(1, soft - SPARE_DESCRIPTORS)
    logger.warning(
        "--max-connections is %d, but the process may open %d files (ulimit -Hn): the limit is %d connections",
        max_connections,
        soft,
        fitting,
    )
    return fitting
