"""Clients that take nothing of what they asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Backlog:
    """So many bytes are to be written, since then."""

    size: int
    since: float


class StalledClients:
    """Finds connections whose client has read nothing for too long while there is something to read.

    Looks at what is left to write, so nothing is spent on the events themselves. A client that reads slowly is none
    that stalls, and neither is one whose answer has still to come.

    **Arguments:** `timeout`: seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._backlogs: dict[asyncio.Transport, _Backlog] = {}

    def look(self, connections: Iterable[asyncio.Transport], now: float) -> list[asyncio.Transport]:
        """Those that have stalled at `now`, in seconds of any clock."""
        backlogs: dict[asyncio.Transport, _Backlog] = {}
        for connection in connections:
            size = connection.get_write_buffer_size()
            if size:
                before = self._backlogs.get(connection)
                backlogs[connection] = before if before and before.size == size else _Backlog(size, now)
        self._backlogs = backlogs
        return [connection for connection, backlog in backlogs.items() if now - backlog.since >= self.timeout]
