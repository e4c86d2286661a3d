"""Lingering close: a client that was refused can read why, though its request is still on its way."""

from __future__ import annotations

import asyncio

MOST_LINGERING = 128
"""Connections that linger at once; further ones are closed without it."""

LINGER_SECONDS = 2.0
"""How long a client that was refused has to read its answer and to close."""

MOST_LINGERED = 4 * 2**20
"""Bytes of a refused request that are read and dropped."""


class LingeringCloses:
    """Connections that have had their last answer. Each is half-closed, and what its client still sends is read and
    dropped: the kernel answers unread bytes with a reset, and the client would lose the answer."""

    def __init__(self) -> None:
        self._closes: set[LingeringClose] = set()

    def begin(self, transport: asyncio.Transport) -> bool:
        """Takes the transport over, unless too many linger; tells whether it did."""
        if len(self._closes) >= MOST_LINGERING or transport.is_closing() or not transport.can_write_eof():
            return False
        close = LingeringClose(transport, self._closes)
        transport.set_protocol(close)
        transport.write_eof()
        transport.resume_reading()
        return True


class LingeringClose(asyncio.BufferedProtocol):
    """One of them. `others`: those that linger."""

    def __init__(self, transport: asyncio.Transport, others: set[LingeringClose]) -> None:
        self._transport = transport
        self._others = others
        self._left = MOST_LINGERED
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
