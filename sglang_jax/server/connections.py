"""Limits of connections: how many may be open, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import h11
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_jax.errors import RequestError
from sglang_jax.logs import OnceASecond
from sglang_jax.server.auth import OPEN_PATHS
from sglang_jax.server.errors import TooManyConnectionsError, error_body
from sglang_jax.server.held_answers import HeldAnswers, share_limit
from sglang_jax.server.lingering import LingeringCloses
from sglang_jax.server.partial_requests import PartialRequests
from sglang_jax.server.sliced_connection import MAX_HEAD_LINES, SlicedConnection, head_too_large
from sglang_jax.server.slices import SLICE, SliceTurns, SmallReads

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MAX_HEADS_BYTES = 16 * 2**20
"""Maximum bytes of all incomplete heads. Heads of 32 KiB on thousands of connections would be more."""

HEALTH_CONNECTIONS = 64
"""Connections above `max_connections`, open only for health checks: a full server must not seem dead."""

MAX_SEARCHED = 64 + HEALTH_CONNECTIONS
"""Maximum waiting connections that are searched for one that can be closed for a new one."""

IDLE_SECONDS = 1.0
"""A connection is not closed for a new one before it has been silent for this long: a request may be on its way."""

MAX_DISCARDED_BYTES = 262_144
"""Maximum bytes of a refused request that are read and discarded before its connection is closed."""

SPARE_DESCRIPTORS = 384
"""File descriptors in addition to `max_connections`: health checks, lingering closes, the engine's sockets, files."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    client_timeout: float


@dataclass(slots=True)
class ConnectionGroup:
    """`waiting`: connections without a request, longest waiting first; `spare`: those above `max_connections`."""

    waiting: dict[BoundedConnection, None] = field(default_factory=dict)
    spare: set[BoundedConnection] = field(default_factory=set)
    lingering: LingeringCloses = field(default_factory=LingeringCloses)

    def first_waiting(self) -> list[BoundedConnection]:
        """The connections that have waited longest, except those whose request waits to be parsed."""
        return [one for one in islice(self.waiting, MAX_SEARCHED) if not one._parsing]


def small_reads(limits: ConnectionLimits) -> Callable[..., SmallReads]:
    """Returns a factory of protocols for uvicorn: connections with these limits that read `SLICE` bytes at a time."""
    turns = SliceTurns()
    connection = bounded_connections(limits, turns)

    def make(*arguments: Any, **options: Any) -> SmallReads:
        return SmallReads(connection(*arguments, **options), turns)

    return make


def bounded_connections(limits: ConnectionLimits, turns: SliceTurns | None = None) -> type[H11Protocol]:
    """Returns a class of connections for uvicorn that share these limits and `turns`."""
    group = ConnectionGroup()
    held = HeldAnswers()
    heads = PartialRequests(MAX_HEADS_BYTES, "heads")
    shared_turns = SliceTurns() if turns is None else turns

    class Connection(BoundedConnection):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(limits, group, held, heads, shared_turns, *arguments, **options)

    return Connection


class BoundedConnection(SlicedConnection):
    """uvicorn's connection, with limits for the time and memory that a client may take.

    - A client has `client_timeout` to send the whole head of a request, from the connection's start or the head's first
      byte. uvicorn itself closes connections that are idle between two requests.
    - A client that reads nothing of an answer for `client_timeout` is cut off. Until then, uvicorn's write buffer holds
      64 KiB and one event, and the engine is not asked for more. For long complete answers, `HeldAnswers` has a limit.
    - If `max_connections` are open, a new connection replaces the one that has been idle longest, for at least
      `IDLE_SECONDS`. If none is idle, it becomes one of `HEALTH_CONNECTIONS` more. A request over one of those takes
      the place of a connection that waits for a request; if all are busy, it is refused with 503, except health checks.
      So silent connections do not keep clients out, and clients do not keep health checks out.
    - If those are open as well, the one that has waited longest is closed, with 503 unless it is idle. If none waits,
      the new connection is refused with 503. A refused client can read why: see `LingeringCloses`.

    For reading, see `SlicedConnection`. Of an answer of unknown length, h11 writes only the start and the end: a chunk
    does not change h11's state, and h11's checks cost as much per event as the engine's client.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        group: ConnectionGroup,
        held: HeldAnswers,
        heads: PartialRequests,
        turns: SliceTurns,
        *arguments: object,
        **options: object,
    ) -> None:
        super().__init__(turns, heads, *arguments, **options)
        self._limits = limits
        self._group = group
        self._held = held
        self._waits_since = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Makes room for the connection, or refuses it. Unlike uvicorn's, makes no system calls for a connection that
        may stay silent: when thousands arrive at once, each call delays the others."""
        self.connections.add(self)
        self.transport, self.flow, self.scheme = transport, FlowControl(transport), "http"
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            self._refuse(self._too_many())
            return
        self._watch()

    def _make_room(self) -> bool:
        """Whether a connection above `max_connections` may stay: it replaces an idle one, or is for health checks."""
        waiting = self._group.first_waiting()
        idle = [one for one in waiting if one._is_idle]
        longest_idle = next((one for one in idle if one not in self._group.spare), None)
        if longest_idle is not None:
            longest_idle.drop()
            return True
        self._group.spare.add(self)
        if len(self.connections) <= self._limits.max_connections + HEALTH_CONNECTIONS:
            return True
        if idle:
            idle[0].drop()
        elif waiting:
            waiting[0]._refuse(self._too_many())
        return bool(waiting)

    def _claim_place(self) -> bool:
        """Whether the request that arrived may run: within `max_connections`, or in place of a waiting connection."""
        spare = self._group.spare
        if self in spare and len(self.connections) - len(spare) >= self._limits.max_connections:
            other = next((one for one in self._group.first_waiting() if one not in spare), None)
            if other is None:
                return False
            spare.add(other)
        spare.discard(self)
        return True

    @property
    def _is_idle(self) -> bool:
        """Whether its client has sent nothing for `IDLE_SECONDS`."""
        return not self._rest and time.monotonic() - self._waits_since > IDLE_SECONDS

    def _too_many(self) -> RequestError:
        return TooManyConnectionsError(
            f"{len(self.connections)} connections are open and busy; the limit is "
            f"{self._limits.max_connections} (--max-connections). Try again later"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._group.waiting.pop(self, None)
        self._group.spare.discard(self)
        self._end_head_timer()
        self._end_unread_timer()
        super().connection_lost(exc)

    @property
    def app(self) -> ASGIApp:
        """The application that uvicorn runs for a request. Bound for each access: a stored bound method would be a
        reference cycle, whose memory only the garbage collector frees."""
        return self._run

    @app.setter
    def app(self, application: ASGIApp) -> None:
        self._application = application

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, writing its chunks without h11, or refuses the request."""
        if scope["path"] not in OPEN_PATHS and not self._claim_place():
            self._refuse(self._too_many())
            return
        if len(scope["headers"]) >= MAX_HEAD_LINES:  # a pipelined head, which was not checked before
            self._refuse(head_too_large())
            return
        cycle, transport, flow = self.cycle, self.transport, self.flow
        chunked = False

        async def send_or_write(message: Message) -> None:
            nonlocal chunked
            if not (chunked and message.get("more_body") and message["body"]):
                await send(message)
                if message["type"] == "http.response.start":
                    chunked = _goes_in_chunks(scope, message)
                return
            if flow.write_paused and not cycle.disconnected:
                await flow.drain()
            if not cycle.disconnected:
                body = message["body"]
                transport.write(b"%x\r\n%b\r\n" % (len(body), body))  # RFC 9112, section 7.1

        share_limit(scope, self._held, transport.abort)
        await self._application(scope, receive, send_or_write)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        self._count_head()
        if self.transport.is_closing():
            self._discard_unread()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._expect_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread_timer()

    def send_400_response(self, msg: str) -> None:
        """Answers malformed HTTP, or a head that is too large, with the error object of all errors."""
        problem = sys.exc_info()[1]
        refusal = RequestError(f"{msg.rstrip('.')}: {problem or 'it is malformed'}", code="malformed_http")
        if isinstance(problem, h11.RemoteProtocolError) and problem.error_status_hint == 431:
            refusal = head_too_large()
        self._refuse(refusal)

    def drop(self) -> None:
        """Closes a connection without a request."""
        self._group.waiting.pop(self, None)
        self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        content = msgspec.json.encode(error_body(error))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(content))), ("Connection", "close")]
        if error.status == 503:
            headers.append(("Retry-After", "1"))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = b"" if self.cycle is not None and self.cycle.scope["method"] == "HEAD" else content
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body)):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        if self.cycle is not None:  # the application must not answer any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._group.lingering.begin(self.transport):
            self._is_over = True
            self.connection_lost(ConnectionAbortedError())  # the transport has another protocol now
        else:
            self.transport.close()
            self._discard_unread()

    def _discard_unread(self) -> None:
        """Reads and discards what arrived of a refused request. If bytes were unread at the close, the kernel would
        send a reset, and the client could lose the answer."""
        socket = self.transport.get_extra_info("socket")
        if socket is None or self not in self.connections:  # the descriptor may be reused
            return
        with suppress(OSError):  # nothing to read
            for _ in range(MAX_DISCARDED_BYTES // SLICE):
                if not os.read(socket.fileno(), SLICE):
                    return

    def _watch(self) -> None:
        """Starts or stops the timer for the head of a request."""
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting or self._is_over or self.transport.is_closing():
            self._group.waiting.pop(self, None)
            self._end_head_timer()
            return
        if self not in self._group.waiting:
            self._group.waiting[self] = None
            self._waits_since = time.monotonic()
        if self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self._limits.client_timeout, self._end_waiting)

    def _end_waiting(self) -> None:
        """Closes the connection, unless the head has arrived and waits to be parsed."""
        self._head_timer = None
        if self._parsing:
            self._watch()
        else:
            self.drop()

    def _expect_reader(self, unread: int) -> None:
        self._unread_timer = self.loop.call_later(self._limits.client_timeout, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        still = self.transport.get_write_buffer_size()
        if still < unread:
            self._expect_reader(still)
            return
        self._unread_timer = None
        logger.warning(
            "Closed a connection whose client read nothing for %g s (--client-timeout): %d bytes were unread",
            self._limits.client_timeout,
            still,
        )
        self.transport.abort()

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _goes_in_chunks(scope: Scope, start: Message) -> bool:
    """Whether h11 sends the answer that starts with `start` in chunks."""
    return (
        scope["http_version"] == "1.1"
        and scope["method"] != "HEAD"
        and start["status"] not in (204, 304)
        and not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in start.get("headers", ()))
    )


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
