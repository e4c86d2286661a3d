"""Reads and parses the input of all connections in small slices, so that no connection blocks the others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from time import perf_counter
from typing import Protocol

SLICE, MIN_SLICE = 8192, 512
"""Maximum and minimum bytes of a slice."""

SLICE_SECONDS = 0.001
"""Target processor time of a slice, to which a connection's slices shrink: 8 KiB of the smallest chunks of a body take
some 20 ms, and a request needs a dozen iterations of the event loop until its first token."""

TURN_SECONDS = 0.0005
"""Seconds of parsing after which the event loop does other work: with a thousand bodies at once, each iteration would
otherwise parse a slice of each."""

BEGINNING = 16_384
"""Bytes of a request that are parsed before longer requests: most requests are not longer."""


CROWD, CROWDED_SLICE = 256, 2048
"""While more than `CROWD` slices wait, `CROWDED_SLICE` bytes are read at once: thousands of connections hold them."""


class Parser(Protocol):
    """A connection with unparsed input."""

    def parse(self) -> None: ...


class SliceTurns:
    """Orders the slices of all connections, and parses slices for `TURN_SECONDS` per iteration of the event loop.

    Heads and the first `BEGINNING` bytes of requests come first, then longer requests, at least one slice of them per
    iteration. Started requests go before others, and the oldest of the long ones first, so few are partly read at a
    time. All methods run on one event loop.
    """

    def __init__(self) -> None:
        self._first: deque[Parser] = deque()
        self._rest: list[tuple[int, int, Parser]] = []
        self._numbers = itertools.count(1)
        self._spent = 0.0
        self._turning = False
        self.buffer = memoryview(bytearray(SLICE))
        """The read buffer of all connections: each read is copied out at once."""

    def number(self) -> int:
        return next(self._numbers)

    def take(self, parser: Parser, *, first: bool, request_number: int = 0) -> bool:
        """Parses a slice now and returns True; or later, and returns False, if others wait or the time is used up.
        `first`: of a head, or of a request's first `BEGINNING` bytes; `request_number`: 0 for a head."""
        if self._spent < TURN_SECONDS and not self._first and (first or not self._rest):
            self._parse(parser)
            return True
        self.put(parser, first=first, request_number=request_number)
        return False

    def put(self, parser: Parser, *, first: bool, request_number: int = 0) -> None:
        """Schedules a slice for a later iteration of the event loop."""
        if not first:
            heapq.heappush(self._rest, (request_number, next(self._numbers), parser))
        elif request_number:
            self._first.appendleft(parser)
        else:
            self._first.append(parser)
        self._turn_later()

    @property
    def crowded(self) -> bool:
        return len(self._first) + len(self._rest) > CROWD

    def _parse(self, parser: Parser) -> None:
        begin = perf_counter()
        try:
            parser.parse()
        finally:
            self._spent += perf_counter() - begin
            self._turn_later()

    def _turn_later(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._spent, self._turning = 0.0, False
        # Only the slices that wait now: those added meanwhile are for the next iteration.
        for _ in range(len(self._first)):
            if self._spent >= TURN_SECONDS:
                break
            self._parse(self._first.popleft())
        for number in range(len(self._rest)):
            if self._spent >= TURN_SECONDS and number:
                break
            self._parse(heapq.heappop(self._rest)[-1])


class SmallReads(asyncio.BufferedProtocol):
    """Reads for a connection, `SLICE` bytes at a time: a transport reads up to 256 KiB, and thousands of connections
    could hold as much unparsed. The rest waits in the kernel, which limits each connection."""

    def __init__(self, connection: asyncio.Protocol, turns: SliceTurns) -> None:
        self._connection = connection
        self._turns = turns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._turns.buffer
        return buffer[:CROWDED_SLICE] if self._turns.crowded else buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(self._turns.buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


def next_slice(size: int, seconds: float) -> int:
    """Returns the size of the next slice, after one of `size` bytes took `seconds`."""
    if seconds > SLICE_SECONDS:
        return max(MIN_SLICE, size // 2)
    return min(SLICE, size * 2) if seconds < SLICE_SECONDS / 4 else size
