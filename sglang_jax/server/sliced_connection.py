"""A connection of which a slice is parsed at a time, in turns with others."""

from __future__ import annotations

import re
import time
from abc import abstractmethod

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from sglang_jax.errors import RequestError
from sglang_jax.server.auth import OPEN_PATHS
from sglang_jax.server.beginnings import Beginnings
from sglang_jax.server.slices import BEGINNING, SLICE, SLICE_SECONDS, SliceTurns, next_slice

MAX_HEAD_BYTES = 32_768
"""Most bytes of a request's head: request line and headers."""

MAX_HEAD_LINES = 128
"""Most lines of a request's head. Eight thousand fit into 32 KiB, and cost 20 ms where as many bytes of one line cost
nothing."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""The blank line behind the headers, as h11 looks for it."""

_HEALTH_CHECKS = tuple(f"{method} {path} ".encode() for method in ("GET", "HEAD") for path in OPEN_PATHS)

_LEAST_OF_TEXT = 0x21
"""No request begins with a smaller byte."""

MEASURED_SLICES = 64
"""So many slices behind one that was slow are measured exactly."""

OTHERS_SHARE = 5
"""So many times as long as a slice took that was slow to parse, its connection waits for the next one."""

WHOLE_PIECES = 3
"""Pieces of a request that are read as they come; most heads are one."""

SMALL_PIECE = 1024
"""Bytes: larger pieces of a body are read as they come, however many. A segment of TCP has more."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1
"""Seconds for which nothing is read behind the last of these; behind each further piece it is twice as long as before.
To be woken for six bytes costs as much as for 64 KiB, so that a few hundred clients that trickle would take a core."""


class SlicedConnection(H11Protocol):
    """uvicorn's connection, read and parsed a little at a time.

    A head is parsed once it is whole: clients that send a line at a time would have h11 look at each. One in many
    pieces is read ever more seldom, and so is a body in many small ones, as a few clients could keep the event loop
    busy with theirs. What comes is parsed in slices, as a client may send a body in thousands of chunks at once, and
    in turns with other connections (`SliceTurns`); health checks wait for nobody.

    **Arguments:** `turns`, `heads`: what the connections of a server share.
    """

    def __init__(self, turns: SliceTurns, heads: Beginnings, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # those of uvicorn's own
        self._turns = turns
        self._heads = heads
        self._rest = bytearray()
        self._slice = SLICE
        self._parsed = self._announced = 0
        self._to_measure = 0
        self._number = 0
        self._parsing = False
        self._is_last = False
        self._is_over = False
        self._looked_at = 0
        self._came = 0
        self._pieces = 0

    @abstractmethod
    def _watch(self) -> None:
        """Something was parsed, or answered: the connection may wait for a request now, or not any more."""

    @abstractmethod
    def _refuse(self, error: RequestError) -> None:
        """Answers with this error, and closes the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets what was not parsed."""
        self._rest.clear()
        self._heads.hold(self, 0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses a slice of what came, and the rest in later turns of the event loop."""
        self._unset_keepalive_if_required()
        self._rest += data
        self._came = len(self._rest)
        if self._parsing:  # a later turn is on its way; somebody else read on
            self.transport.pause_reading()
            return
        self._parsing = True
        if self.conn.their_state is h11.IDLE and self._rest.startswith(_HEALTH_CHECKS):
            self.parse()  # whatever waits of others: who asks is to hear that the server lives
        elif not self._turns.take(self, first=self._is_first, begun=self._begun):
            self.transport.pause_reading()

    def parse(self) -> None:
        """Parses a slice, as its turn has come."""
        self._parse_next()
        self._count_head()

    def _parse_later(self) -> None:
        self._turns.put(self, first=self._is_first, begun=self._begun)

    @property
    def _begun(self) -> int:
        """The number of the request whose body comes."""
        return 0 if self.conn.their_state is h11.IDLE else self._number

    @property
    def _is_first(self) -> bool:
        """Among the first bytes of a request, unless it has announced that it is a long one."""
        if self.conn.their_state is h11.IDLE:
            return True
        return self._parsed < BEGINNING and self._announced <= BEGINNING

    def _count_head(self) -> None:
        """Counts what is held of a head that is not whole, or of what came behind a request that is at work."""
        size = 0
        if not self._parsing and not self._is_over and not self.transport.is_closing():
            size = len(self._rest)
            if self.conn.their_state is not h11.SEND_BODY:
                size += len(self.conn.trailing_data[0])
        self._heads.hold(self, size)

    def refuse(self, error: RequestError) -> None:
        """The head is not waited for any longer."""
        self._rest.clear()
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(error)
        else:
            self.transport.abort()  # an answer to what is behind the request would be taken for the request's

    def _parse_next(self) -> None:
        self._parsing = False
        if self.transport.is_closing() or not self._rest:  # nothing would be the connection's end for h11
            self._rest.clear()
            return
        if self.conn.their_state is h11.IDLE:
            self._parsed = 0
        size = self._size_of_next()
        if size == 0:
            self._watch()
            self._await_piece()
            self._end_if_last()
            return
        data = bytes(self._rest[:size])
        del self._rest[:size]
        if self.server is None:
            self.server, self.client = get_local_addr(self.transport), get_remote_addr(self.transport)
        cycle = self.cycle
        took = self._parse_slice(data)
        if self.cycle is not cycle:
            self._begin_request()
        elif took > SLICE_SECONDS / 2:
            self._number = self._turns.number()  # it is not to go before others for ever
        self._slice = next_slice(self._slice, took)
        self._parsed += len(data)
        self._watch()
        if self._rest:
            self._parsing = True
            self.transport.pause_reading()
            if took > SLICE_SECONDS / 2:
                self.loop.call_later(took * OTHERS_SHARE, self._parse_later)
            else:
                self._parse_later()
        elif self._came <= SMALL_PIECE and self._in_part():
            self._await_piece()
        else:
            self._pieces = 0
            self._read_on()
        self._end_if_last()

    def _begin_request(self) -> None:
        """A head was parsed."""
        self._number = self._turns.number()
        self._announced = next((int(size) for name, size in self.headers if name == b"content-length"), 0)

    def _end_if_last(self) -> None:
        """The server shuts down, and what had come by then is parsed."""
        if self._is_last and not self._parsing and not self._is_over:
            super().shutdown()

    def shutdown(self) -> None:
        """Ends the connection once what has come is answered."""
        self._is_last = True
        self._end_if_last()

    def _parse_slice(self, data: bytes) -> float:
        """Returns how long it took of a processor's time, or, where that was not measured, how long it took: on some
        virtual machines to ask for a thread's time takes as long as to parse a slice, so it is asked for where one was
        slow, if only because of what else the machine does."""
        begin, exact = time.perf_counter(), time.thread_time() if self._to_measure else None
        super().data_received(data)
        if exact is None:  # it is not known whose time that was
            took = min(time.perf_counter() - begin, SLICE_SECONDS / 2)
        else:
            took = time.thread_time() - exact
            self._to_measure -= 1
        if took > SLICE_SECONDS / 4:
            self._to_measure = MEASURED_SLICES
        return took

    def _in_part(self) -> bool:
        """More of the request is to come: of its body, or of a head that h11 has since it began behind another."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _await_piece(self) -> None:
        """The next piece of a request that is not whole yet is read now, or later where there were many."""
        self._pieces += 1
        if self._pieces < WHOLE_PIECES:
            self._read_on()  # it may have been paused for a piece before
            return
        doublings = min(self._pieces - WHOLE_PIECES, 16)
        if not self._is_over and not self.transport.is_closing():
            self.transport.pause_reading()
        self.loop.call_later(min(FIRST_PAUSE * 2**doublings, LONGEST_PAUSE), self._read_on)

    def _read_on(self) -> None:
        if not self._is_over and not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()

    def _size_of_next(self) -> int:
        """Bytes to be parsed now: those of a head, where it is one's turn, or 0 until it is whole or too large."""
        rest = self._rest
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0] or rest[:1] < bytes([_LEAST_OF_TEXT]):
            return self._slice
        end = _END_OF_HEAD.search(rest, self._looked_at)
        if end is not None and end.end() <= MAX_HEAD_BYTES and rest.count(b"\n", 0, end.end()) <= MAX_HEAD_LINES:
            self._looked_at = 0
            return end.end()
        if end is not None or len(rest) > MAX_HEAD_BYTES:
            self._refuse(head_too_large())
            rest.clear()
            return 0
        self._looked_at = max(len(rest) - 2, 0)
        return 0

    def on_response_complete(self) -> None:
        """The next request may come, or has come behind the one before."""
        cycle = self.cycle
        super().on_response_complete()
        if self.cycle is not cycle:
            self._parsed = 0
            self._begin_request()


def head_too_large() -> RequestError:
    refusal = RequestError(
        f"the head of the request is too large; the limit is {MAX_HEAD_BYTES} bytes, in {MAX_HEAD_LINES} lines"
    )
    refusal.status, refusal.code = 431, "head_too_large"
    return refusal
