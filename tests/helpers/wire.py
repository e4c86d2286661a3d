"""A connection of the server without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

Protocol = TypeVar("Protocol", bound=HttpToolsProtocol)


class Wire(asyncio.Transport):
    """A client's end that keeps the bytes it receives, and knows whether the server reads. `unread`: bytes that the
    server's transport says are waiting for the client. `ended`: the server has said that it writes no more."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closing = False
        self.reading = True
        self.unread = 1
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing, "written to a connection that is closed"
        assert not self.ended, "written after the end"
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

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


def connect(protocol: Callable[..., Protocol], app: ASGIApp, state: ServerState | None = None) -> tuple[Protocol, Wire]:
    """`state`: of the server, a new one if it is not given."""
    config = uvicorn.Config(cast(Any, app), http=cast(Any, protocol), ws="none", lifespan="off", log_config=None)
    config.load()
    connection, wire = protocol(config, state or ServerState(), {}), Wire()
    connection.connection_made(wire)
    return connection, wire
