"""A connection of the server without a socket."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class Wire(asyncio.Transport):
    """A client's end that keeps the bytes it receives, and knows whether the server reads. `unread`: bytes that the
    server's transport says are waiting for the client."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closing = False
        self.reading = True
        self.unread = 1

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing, "written to a connection that is closed"
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.unread


def connect(
    protocol: type[HttpToolsProtocol], app: ASGIApp, state: ServerState | None = None
) -> tuple[HttpToolsProtocol, Wire]:
    """`state`: of the server, a new one if it is not given."""
    config = uvicorn.Config(cast(Any, app), http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    connection, wire = protocol(config, state or ServerState(), {}), Wire()
    connection.connection_made(wire)
    return connection, wire
