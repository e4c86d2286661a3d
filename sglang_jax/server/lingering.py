"""Lingering close: a refused client can read why, even if it is still sending its request."""

from __future__ import annotations

import asyncio

MAX_LINGERING = 128
"""Maximum connections that linger at once; further ones are closed at once."""

LINGER_SECONDS = 2.0
"""Seconds that a refused client has to read its answer and close."""

MAX_LINGERED_BYTES = 4 * 2**20
"""Maximum bytes of a refused request that are read and discarded."""


class LingeringCloses:
    """Connections whose last answer was sent. Each is half-closed, and input is read and discarded: if bytes were
    unread, the kernel would send a reset, and the client would lose the answer."""

    def __init__(self) -> None:
        self._closes: set[LingeringClose] = set()

    def begin(self, transport: asyncio.Transport) -> bool:
        """Takes over the transport, unless too many linger. Returns whether it did."""
        if len(self._closes) >= MAX_LINGERING or transport.is_closing() or not transport.can_write_eof():
            return False
        close = LingeringClose(transport, self._closes)
        transport.set_protocol(close)
        transport.write_eof()
        transport.resume_reading()
        return True


class LingeringClose(asyncio.BufferedProtocol):
    def __init__(self, transport: asyncio.Transport, others: set[LingeringClose]) -> None:
        self._transport = transport
        self._others = others
        self._left = MAX_LINGERED_BYTES
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)
        others.add(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return bytearray(8192)

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0:
            self._transport.abort()

    def eof_received(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._others.discard(self)
