"""What comes over connections is read and parsed a little at a time, in turns."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from time import perf_counter
from typing import Protocol

SLICE, LEAST_SLICE = 8192, 512
"""Most and fewest bytes that are parsed before the event loop turns."""

SLICE_SECONDS = 0.001
"""Processor time that a slice is to take: 8 KiB of a body's smallest chunks take some 20 ms, and a request needs a
dozen turns of the event loop until its first token. Slices of a connection become smaller until they take no more."""

TURN_SECONDS = 0.0005
"""Seconds after which the event loop turns before the slices of further connections are parsed. A thousand
bodies at once would make each turn last as long as a slice of all of them."""

BEGINNING = 16_384
"""Bytes of a request that are parsed before those of longer ones: most requests have no more."""


CROWD, CROWDED_SLICE = 256, 2048
"""Where so many slices wait, so few bytes of each further connection are read at once: thousands wait with them."""


class Parser(Protocol):
    """A connection of which something waits to be parsed."""

    def parse(self) -> None:
        """Parses a slice."""
        ...


class SliceTurns:
    """The slices of all connections, so many in a turn of the event loop as `TURN_SECONDS` allow: those of the first
    `BEGINNING` bytes of requests and of heads, then those of longer requests, at least one of which is parsed in each
    turn. What has begun goes before what has not, and the oldest of long requests first: of a crowd, few are in part.
    All methods run on one event loop."""

    def __init__(self) -> None:
        self._first: deque[Parser] = deque()
        self._rest: list[tuple[int, int, Parser]] = []
        self._numbers = itertools.count(1)
        self._spent = 0.0
        self._turning = False
        self.buffer = memoryview(bytearray(SLICE))
        """Of every connection: what is read is taken out at once."""

    def number(self) -> int:
        """For a request that begins: larger than any before."""
        return next(self._numbers)

    def take(self, parser: Parser, *, first: bool, begun: int = 0) -> bool:
        """Has a slice parsed now, or in a later turn of the event loop where others wait, or had this one; tells
        whether it was. `first`: of a head, or among the first `BEGINNING` bytes of a request; `begun`: the number of a
        request whose head was parsed, 0 for a head."""
        if self._spent < TURN_SECONDS and not self._first and (first or not self._rest):
            self._parse(parser)
            return True
        self.put(parser, first=first, begun=begun)
        return False

    def put(self, parser: Parser, *, first: bool, begun: int = 0) -> None:
        """Has a slice parsed in a later turn of the event loop."""
        if not first:
            heapq.heappush(self._rest, (begun, next(self._numbers), parser))
        elif begun:
            self._first.appendleft(parser)
        else:
            self._first.append(parser)
        self._turn_later()

    @property
    def crowded(self) -> bool:
        """Many wait: no more is to be read of each than tells what it is about."""
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
        # As many as there are now: what is put here while a turn lasts is for the next one.
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
    would hold as much at once of what is parsed later. The rest waits in the kernel, where each has its limit."""

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
    """How many bytes to parse at once, after so many took so long."""
    if seconds > SLICE_SECONDS:
        return max(LEAST_SLICE, size // 2)
    return min(SLICE, size * 2) if seconds < SLICE_SECONDS / 4 else size
