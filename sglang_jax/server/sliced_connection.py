"""A connection whose input is parsed in slices, alternating with other connections."""

from __future__ import annotations

import re
import time
from abc import abstractmethod

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from sglang_jax.errors import RequestError
from sglang_jax.server.auth import OPEN_PATHS
from sglang_jax.server.partial_requests import PartialRequests
from sglang_jax.server.slices import BEGINNING, SLICE, SLICE_SECONDS, SliceTurns, next_slice

MAX_HEAD_BYTES = 32_768
"""Maximum bytes of a request's head: request line and headers."""

MAX_HEAD_LINES = 128
"""Maximum lines of a request's head: eight thousand fit into 32 KiB and take 20 ms to parse; one line of 32 KiB takes
almost no time."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""The blank line after the headers, as h11 searches for it."""

_HEALTH_CHECKS = tuple(f"{method} {path} ".encode() for method in ("GET", "HEAD") for path in OPEN_PATHS)

_MIN_FIRST_BYTE = 0x21
"""The smallest byte that a request can start with."""

MEASURED_SLICES = 64
"""Slices after a slow one whose processor time is measured."""

PAUSE_FACTOR = 5
"""After a slow slice, its connection pauses for this many times the slice's time."""

WHOLE_PIECES = 3
"""Pieces of a request that are read without pauses; most heads are one piece."""

SMALL_PIECE = 1024
"""Bytes. Larger pieces of a body are always read without pauses; a segment of TCP has more."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1
"""Seconds of the pause after the last of `WHOLE_PIECES`, doubled for each further piece, and its maximum. Waking up for
six bytes costs as much as for 64 KiB, so a few hundred trickling clients could use a whole core."""


class SlicedConnection(H11Protocol):
    """uvicorn's connection, read and parsed a little at a time. `turns`, `heads`: shared by the connections of a
    server.

    A head is parsed once it is complete; otherwise h11 would parse it again for each line of a slow client. Heads in
    many pieces, and bodies in many small ones, are read with growing pauses, so that a few clients cannot keep the
    event loop busy. Input is parsed in slices, alternating with other connections (`SliceTurns`), because a client may
    send a body in thousands of chunks at once. Health checks do not wait.
    """

    def __init__(self, turns: SliceTurns, heads: PartialRequests, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]  # uvicorn's arguments
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
        """Called after something was parsed or answered: it may have started or stopped waiting for a request."""

    @abstractmethod
    def _refuse(self, error: RequestError) -> None:
        """Answers with this error, and closes the connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest.clear()
        self._heads.hold(self, 0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses a slice of the input, and the rest in later iterations of the event loop."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._rest += data
        self._came = len(self._rest)
        if self._parsing:  # parsing is scheduled; reading was resumed elsewhere
            self.transport.pause_reading()
            return
        self._parsing = True
        if self.conn.their_state is h11.IDLE and self._rest.startswith(_HEALTH_CHECKS):
            self.parse()  # before all others: an orchestrator must see that the server is alive
        elif not self._turns.take(self, first=self._is_first, request_number=self._current_number):
            self.transport.pause_reading()

    def parse(self) -> None:
        """Parses the next slice. Called by `SliceTurns`."""
        self._parse_next()
        self._count_head()

    def _parse_later(self) -> None:
        self._turns.put(self, first=self._is_first, request_number=self._current_number)

    @property
    def _current_number(self) -> int:
        """The number of the request whose body is being received; 0 for a head."""
        return 0 if self.conn.their_state is h11.IDLE else self._number

    @property
    def _is_first(self) -> bool:
        """Whether the next slice is a head's, or of the first `BEGINNING` bytes of a request not announced as
        longer."""
        if self.conn.their_state is h11.IDLE:
            return True
        return self._parsed < BEGINNING and self._announced <= BEGINNING

    def _count_head(self) -> None:
        """Reports the bytes held of an incomplete head, or of input after a request that is running."""
        size = 0
        if not self._parsing and not self._is_over and not self.transport.is_closing():
            size = len(self._rest)
            if self.conn.their_state is not h11.SEND_BODY:
                size += len(self.conn.trailing_data[0])
        self._heads.hold(self, size)

    def refuse(self, error: RequestError) -> None:
        self._rest.clear()
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(error)
        else:
            self.transport.abort()  # the error would be taken for the answer to the running request

    def _parse_next(self) -> None:
        self._parsing = False
        if self.transport.is_closing() or not self._rest:  # h11 takes empty input for the connection's end
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
            self._number = self._turns.number()  # otherwise it would keep its priority forever
        self._slice = next_slice(self._slice, took)
        self._parsed += len(data)
        self._watch()
        if self._rest:
            self._parsing = True
            self.transport.pause_reading()
            if took > SLICE_SECONDS / 2:
                self.loop.call_later(took * PAUSE_FACTOR, self._parse_later)
            else:
                self._parse_later()
        elif self._came <= SMALL_PIECE and self._in_part():
            self._await_piece()
        else:
            self._pieces = 0
            self._read_on()
        self._end_if_last()

    def _begin_request(self) -> None:
        self._number = self._turns.number()
        self._announced = next((int(size) for name, size in self.headers if name == b"content-length"), 0)

    def _end_if_last(self) -> None:
        """Closes the connection if the server shuts down and all input is parsed."""
        if self._is_last and not self._parsing and not self._is_over:
            super().shutdown()

    def shutdown(self) -> None:
        """Closes the connection once all input is answered."""
        self._is_last = True
        self._end_if_last()

    def _parse_slice(self, data: bytes) -> float:
        """Parses input, and returns its processor time in seconds. It is measured exactly only after a slow slice,
        because on some virtual machines reading a thread's time takes as long as parsing a slice; otherwise returns the
        elapsed time, limited because it may include other work of the machine."""
        begin, exact = time.perf_counter(), time.thread_time() if self._to_measure else None
        super().data_received(data)
        if exact is None:  # may include time of other threads and processes
            took = min(time.perf_counter() - begin, SLICE_SECONDS / 2)
        else:
            took = time.thread_time() - exact
            self._to_measure -= 1
        if took > SLICE_SECONDS / 4:
            self._to_measure = MEASURED_SLICES
        return took

    def _in_part(self) -> bool:
        """Whether the request is incomplete: its body, or a pipelined head that h11 already holds."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _await_piece(self) -> None:
        """Reads the next piece of an incomplete request: now, or after a pause if there were many."""
        self._pieces += 1
        if self._pieces < WHOLE_PIECES:
            self._read_on()  # an earlier piece may have paused it
            return
        doublings = min(self._pieces - WHOLE_PIECES, 16)
        if not self._is_over and not self.transport.is_closing():
            self.transport.pause_reading()
        self.loop.call_later(min(FIRST_PAUSE * 2**doublings, LONGEST_PAUSE), self._read_on)

    def _read_on(self) -> None:
        if not self._is_over and not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()

    def _size_of_next(self) -> int:
        """Bytes to parse now: of a head all, or 0 until it is complete. Refuses a head that is too large."""
        rest = self._rest
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0] or rest[:1] < bytes([_MIN_FIRST_BYTE]):
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
