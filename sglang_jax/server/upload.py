"""Receives the upload of a file (`multipart/form-data`, RFC 7578) in pieces, from the connection to the disk."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from fastapi import Request, Response
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sglang_jax.errors import ParameterError, RequestError, quote
from sglang_jax.logs import OnceASecond
from sglang_jax.server.errors import (
    BusyError,
    ClientTooSlowError,
    MalformedRequestError,
    MediaTypeError,
    ShuttingDownError,
    close_after_error,
)
from sglang_jax.server.file_store import Draft
from sglang_jax.server.request_body import MIN_BYTES_PER_SECOND
from sglang_jax.server.shutdown import SHUTDOWN, Shutdown

logging.getLogger("python_multipart.multipart").addFilter(OnceASecond())

PIECE_BYTES = 256 * 2**10
"""Bytes of a file that are written at once."""

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 8192
"""Limits of a form's parts apart from the file's content."""

MAX_OVERHEAD_BYTES = 256 * 2**10
"""Maximum bytes of a form in addition to its file."""

MAX_UPLOADS = 64
MAX_UPLOADS_EACH = 16
"""Maximum uploads at once, of all callers and of each: a piece of each is in memory."""


class Form:
    """Splits a form into its fields and the content of its file. `file_field`: the file's name in the form."""

    def __init__(self, content_type: str, file_field: str = "file") -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise MediaTypeError(
                f"the body must be sent as Content-Type: multipart/form-data with a boundary, got {quote(content_type)}"
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._file_field = file_field
        self._name = self._header = ""
        self._value = bytearray()
        self._headers: dict[str, bytes] = {}
        self._in_file = False
        self._content: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_content,
                    "on_part_data": self._part_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise MediaTypeError(f"the boundary in Content-Type cannot be used: {error}") from error

    def feed(self, data: bytes) -> bytes:
        """Returns the bytes of the file in the next part of the body. Raises `RequestError`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise MalformedRequestError(f"the body is not valid multipart/form-data: {error}") from error
        content = b"".join(self._content)
        self._content.clear()
        return content

    def _begin_part(self) -> None:
        self._headers = {}
        self._value = bytearray()
        self._header = ""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].decode("latin-1").lower()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header] = bytes(self._value)
        self._header, self._value = "", bytearray()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = _text(options.get(b"name", b""), "the name of a field")
        filename = options.get(b"filename")
        self._in_file = self._name == self._file_field
        if self._name in self.fields or (self._in_file and self.filename is not None):
            raise ParameterError(f"{quote(self._name)} is in the form twice", param=self._name)
        if len(self.fields) >= MAX_FIELDS:
            raise MalformedRequestError(f"the form has more than {MAX_FIELDS} fields")
        if self._in_file:
            if filename is None:
                raise ParameterError(
                    f"{self._name} must be a file, with a filename in its Content-Disposition", param=self._name
                )
            self.filename = _text(filename, "the filename")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._content.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ParameterError(
                f"{quote(self._name)} has more than {MAX_FIELD_BYTES} bytes, the limit of a field", param=self._name
            )

    def _end_part(self) -> None:
        if not self._in_file:
            self.fields[self._name] = _text(bytes(self._value), quote(self._name))

    def _end(self) -> None:
        self.complete = True


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequestError(f"{what} is not UTF-8, at byte {error.start + 1}") from error


@dataclass(slots=True)
class Uploads:
    """The uploads in progress. `client_timeout`: as of `BodyLimit`, whose limits for slow clients hold here too."""

    client_timeout: float
    _running: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def enter(self, caller: str) -> Iterator[None]:
        """Counts an upload while the context is open. Raises `BusyError`."""
        for count, most, whose in (
            (self._running.total(), MAX_UPLOADS, "this server"),
            (self._running[caller], MAX_UPLOADS_EACH, "one client"),
        ):
            if count >= most:
                raise BusyError(f"{count} uploads are in progress, the limit of {whose} is {most}; try again later")
        self._running[caller] += 1
        try:
            yield
        finally:
            self._running[caller] -= 1

    async def receive(self, request: Request, form: Form, draft: Draft, most: int) -> None:
        """Reads a form of at most `most` bytes to its end, and its file into `draft`. Raises `RequestError`;
        `ClientDisconnect`."""
        piece = bytearray()
        async with aclosing(_received(request, self.client_timeout)) as parts:
            received = 0
            async for part in parts:
                received += len(part)
                if received > most:
                    raise MalformedRequestError(
                        f"the form has at least {received} bytes; a file and its fields may have {most}"
                    )
                piece += form.feed(part)
                if len(piece) >= PIECE_BYTES:
                    await draft.add(bytes(piece))
                    piece.clear()
        if not form.complete:
            raise MalformedRequestError(f"the form ends before its last boundary, after {received} bytes")
        await draft.add(bytes(piece))


async def _received(request: Request, patience: float) -> AsyncGenerator[bytes]:
    """Yields the parts of a body. Waits for each as long as `BodyLimit` does: `patience` seconds without data. Raises
    `ClientTooSlowError`, `ShuttingDownError`, `ClientDisconnect`."""
    loop = asyncio.get_running_loop()
    begin, received = loop.time(), 0
    deadline: asyncio.Timeout | None = None

    def stop() -> None:
        if deadline is not None and not deadline.expired():
            deadline.reschedule(loop.time())

    shutdown = SHUTDOWN.get(None) or Shutdown()
    shutdown.add(stop)
    try:
        more = True
        while more:
            until = loop.time() if shutdown.stopped else begin + patience + received / MIN_BYTES_PER_SECOND
            async with asyncio.timeout_at(until) as deadline:
                message = await request.receive()
            deadline = None
            if message["type"] != "http.request":
                raise ClientDisconnect
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            yield message.get("body", b"")
    except TimeoutError as error:
        if shutdown.stopped:
            raise ShuttingDownError(
                f"the server is shutting down, and of the body only {received} bytes came"
            ) from error
        raise ClientTooSlowError(
            f"{received} bytes of the body arrived in {loop.time() - begin:.1f} s; the limit is {patience:g} s without "
            f"data (--client-timeout), then {MIN_BYTES_PER_SECOND} bytes/s"
        ) from error
    finally:
        shutdown.discard(stop)


class RefusedUpload(Response):
    """Answers an upload with an error, and closes its connection if the rest of the body does not come soon."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await close_after_error(self._error, scope, receive, send)
