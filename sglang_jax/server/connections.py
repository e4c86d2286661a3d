"""Connections that cannot be held for nothing: how many there are, and how long each may keep the server waiting."""

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
from sglang_jax.server.beginnings import Beginnings
from sglang_jax.server.errors import TooManyConnectionsError, error_body
from sglang_jax.server.held_answers import HeldAnswers, share_limit
from sglang_jax.server.lingering import LingeringCloses
from sglang_jax.server.sliced_connection import MAX_HEAD_LINES, SlicedConnection, head_too_large
from sglang_jax.server.slices import SLICE, SliceTurns, SmallReads

logger = logging.getLogger(__name__)
logger.addFilter(OnceASecond())

MOST_OF_HEADS = 16 * 2**20
"""Most bytes of all heads that are not whole: a head of 32 KiB on each of thousands of connections would be more."""

HEALTH_CONNECTIONS = 64
"""So many more may be open while `max_connections` are at work, for health checks alone: who watches a server that is
full is not to think it dead, and start it again."""

MOST_LOOKED_AT = 64 + HEALTH_CONNECTIONS
"""Of connections that wait for a request, for one whose place another may have."""

IDLE_SECONDS = 1.0
"""A connection that has waited for less may have a request on its way, and is not closed for a new one."""

MOST_DISCARDED = 262_144
"""Bytes of a refused request that are taken from the kernel before its connection is closed."""

SPARE_DESCRIPTORS = 384
"""What the process needs beside `max_connections`: those for health checks, those that linger, the engine's sockets,
logs, files that are read."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`max_connections`: open at once. `client_timeout`: seconds, see the option of this name."""

    max_connections: int
    client_timeout: float


@dataclass(slots=True)
class ConnectionGroup:
    """The connections of a server. `waiting`: for a request, in the order in which they began to; the first has waited
    longest. `spare`: beyond `max_connections`."""

    waiting: dict[BoundedConnection, None] = field(default_factory=dict)
    spare: set[BoundedConnection] = field(default_factory=set)
    lingering: LingeringCloses = field(default_factory=LingeringCloses)

    def first_waiting(self) -> list[BoundedConnection]:
        """Those that have waited longest, but for those whose request waits for its turn to be parsed."""
        return [one for one in islice(self.waiting, MOST_LOOKED_AT) if not one._parsing]


def small_reads(limits: ConnectionLimits) -> Callable[..., SmallReads]:
    """Makes what reads for a connection, as uvicorn makes one for each."""
    turns = SliceTurns()
    connection = bounded_connections(limits, turns)

    def make(*arguments: Any, **options: Any) -> SmallReads:
        return SmallReads(connection(*arguments, **options), turns)

    return make


def bounded_connections(limits: ConnectionLimits, turns: SliceTurns | None = None) -> type[H11Protocol]:
    """uvicorn's connections with these limits, which all of them share, and in these turns."""
    group = ConnectionGroup()
    held = HeldAnswers()
    heads = Beginnings(MOST_OF_HEADS, "heads")
    shared_turns = SliceTurns() if turns is None else turns

    class Connection(BoundedConnection):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(limits, group, held, heads, shared_turns, *arguments, **options)

    return Connection


class BoundedConnection(SlicedConnection):
    """uvicorn's connection, which ends when its client keeps it waiting.

    - A client has `client_timeout` for the whole head of a request, from the connection's start or from the head's
      first byte; uvicorn itself closes those that are idle between two requests.
    - A client that reads nothing of an answer for that time is cut off. Until then uvicorn's write buffer holds 64 KiB
      and one event, and the engine is not asked for more. Of long answers that are whole only so much
      waits: see `HeldAnswers`.
    - Where `max_connections` are open, a new one has that closed which has been idle longest: which has sent nothing
      for `IDLE_SECONDS`. If there is none, it is one of `HEALTH_CONNECTIONS` more. A request that comes over those has
      the place of a connection that waits for its own request; if all are at work, it is refused with 503, but for
      `/health` and the like. So silent connections keep nobody out, and nobody keeps health checks out.
    - Where those are open as well, the one that has waited longest is refused with 503.
    - Whoever is refused can read why: see `LingeringCloses`.

    How it is read: see `SlicedConnection`. Of an answer whose length is not
    known, h11 writes the beginning and the end, and the connection the chunks between them: a chunk changes nothing in
    h11's state, and its checks cost an event as much as the engine's client.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        group: ConnectionGroup,
        held: HeldAnswers,
        heads: Beginnings,
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
        """Makes room for the connection, or refuses it. As uvicorn's, but that nothing is asked of the kernel for one
        that may stay silent: of thousands that come at once, each is in the way of others."""
        self.connections.add(self)
        self.transport, self.flow, self.scheme = transport, FlowControl(transport), "http"
        if len(self.connections) > self._limits.max_connections and not self._has_room():
            self._refuse(self._too_many())
            return
        self._watch()

    def _has_room(self) -> bool:
        """Finds a place for a connection that is one too many: an idle one's, or one of those for health checks."""
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

    def _has_place(self) -> bool:
        """A request has come: is there a place for it among `max_connections`, or one of a connection that waits?"""
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
        """Its client has sent nothing for a while."""
        return not self._rest and time.monotonic() - self._waits_since > IDLE_SECONDS

    def _too_many(self) -> RequestError:
        return TooManyConnectionsError(
            f"{len(self.connections)} connections are open and busy; the limit is "
            f"{self._limits.max_connections} (--max-connections). Try again later"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._group.waiting.pop(self, None)
        self._group.spare.discard(self)
        self._end_head_timer()
        self._end_unread_timer()
        super().connection_lost(exc)

    @property
    def app(self) -> ASGIApp:
        """What uvicorn runs for a request. Bound anew each time: a connection that kept it would refer to itself, and
        what it holds would be freed when the garbage collector comes, not at once."""
        return self._run

    @app.setter
    def app(self, application: ASGIApp) -> None:
        self._application = application

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, whose chunks are written past h11; or why the request is not answered."""
        if scope["path"] not in OPEN_PATHS and not self._has_place():
            self._refuse(self._too_many())
            return
        if len(scope["headers"]) >= MAX_HEAD_LINES:  # a head that came behind another request
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
        """The next request may come."""
        super().on_response_complete()
        self._watch()
        self._count_head()
        if self.transport.is_closing():
            self._discard_unread()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        super().pause_writing()
        if self._unread_timer is None:
            self._expect_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._end_unread_timer()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, or a head that is too large, with the error object that other errors have."""
        problem = sys.exc_info()[1]
        refusal = RequestError(f"{msg.rstrip('.')}: {problem or 'it is malformed'}", code="malformed_http")
        if isinstance(problem, h11.RemoteProtocolError) and problem.error_status_hint == 431:
            refusal = head_too_large()
        self._refuse(refusal)

    def drop(self) -> None:
        """Closes the connection, whose client has asked for nothing."""
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
        if self.cycle is not None:  # who is about to answer the request has nobody left to answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self._group.lingering.begin(self.transport):
            self._is_over = True
            self.connection_lost(ConnectionAbortedError())  # the transport is another protocol's now
        else:
            self.transport.close()
            self._discard_unread()

    def _discard_unread(self) -> None:
        """Takes from the kernel what came of a request that was refused: at the connection's end it would answer unread
        bytes with a reset, and the client lose what it was answered."""
        socket = self.transport.get_extra_info("socket")
        if socket is None or self not in self.connections:  # the descriptor may be somebody else's
            return
        with suppress(OSError):  # nothing is there
            for _ in range(MOST_DISCARDED // SLICE):
                if not os.read(socket.fileno(), SLICE):
                    return

    def _watch(self) -> None:
        """Starts or ends the client's time for the head of a request."""
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
        """The client's time for a head is over, unless it is the server that has yet to parse it."""
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
    """Whether h11 frames the answer that begins with `start` as chunks."""
    return (
        scope["http_version"] == "1.1"
        and scope["method"] != "HEAD"
        and start["status"] not in (204, 304)
        and not any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in start.get("headers", ()))
    )


def raise_descriptor_limit(max_connections: int) -> int:
    """Lets the process open as many files as so many connections need, as far as its hard limit allows.

    **Returns:** how many connections fit.
    """
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
