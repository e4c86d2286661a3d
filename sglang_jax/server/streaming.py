"""Server-sent events, long answers, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sglang_jax.engine.types import OutputDelta
from sglang_jax.errors import RequestError
from sglang_jax.server.error_shapes import openai_error
from sglang_jax.server.errors import ShuttingDownError, internal_error
from sglang_jax.server.held_answers import hold
from sglang_jax.server.shutdown import SHUTDOWN, Shutdown

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Item = TypeVar("Item")

FEW_LOGPROBS = 2048
"""Maximum logprobs that are written on the event loop: about 2 ms."""

LOGPROBS_PER_COMPLETION = 16
"""Writing a completion takes about as long as this many logprobs."""

RESPONSE_SLICE = 131_072
"""Bytes of an answer that are passed to a connection at once."""

LIST_SLICE = 64
"""Items of a list that are encoded at a time."""

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(payload: object) -> bytes:
    """Returns a server-sent event (WHATWG HTML, section 9.2) with `payload` as JSON."""
    return b"data: %b\n\n" % _encoder.encode(payload)


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How a stream carries events. `failed`: returns an error as the last event; `done`: what follows the last event of
    a stream that did not fail."""

    media_type: str
    failed: Callable[[RequestError], bytes]
    done: bytes = b""


OPENAI_EVENTS = StreamStyle("text/event-stream", lambda error: event(openai_error(error)), DONE)


def named_event(name: str, payload: object) -> bytes:
    """Returns a server-sent event with a type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(payload))


def json_line(payload: object) -> bytes:
    """Returns a line of a stream of JSON values."""
    return _encoder.encode(payload) + b"\n"


class LongResponse(Response):
    """JSON of megabytes, passed to the connection in slices as its client reads: the whole would be copied twice on its
    way, and each copy would wait in memory. `HeldAnswers` limits the waiting bytes of all."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes | bytearray]) -> None:
        self._size = sum(map(len, parts))
        super().__init__(headers={"Content-Length": str(self._size)})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with hold(scope, self._size) as sent:
            for part in self._parts:
                for start in range(0, len(part), RESPONSE_SLICE):
                    body = bytes(part[start : start + RESPONSE_SLICE])
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    if not sent(len(body)):
                        return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(payload: object) -> Response:
    return _response([_encoder.encode(payload)])


def json_list(items: Sequence[Item], shape: Callable[[Item], object]) -> msgspec.Raw:
    """Returns the list of `shape(item)` as JSON, encoded a few items at a time, because a prompt's logprobs take
    several times as much memory before that."""
    content = bytearray(b"[")
    for start in range(0, len(items), LIST_SLICE):
        content += b"," if start else b""
        content += memoryview(_encoder.encode([shape(item) for item in items[start : start + LIST_SLICE]]))[1:-1]
    content += b"]"
    return msgspec.Raw(content)


def json_list_response(head: bytes, items: Iterable[object], tail: bytes) -> Response:
    """Returns JSON with a list between `head` and `tail`. Encodes each item before the next is created, because
    logprobs take several times as much memory as their JSON."""
    content = bytearray()
    for item in items:
        content += (b"," if content else b"") + _encoder.encode(item)
    return _response([head, content, tail])


def _response(parts: Sequence[bytes | bytearray]) -> Response:
    if sum(map(len, parts)) > RESPONSE_SLICE:
        return LongResponse(parts)
    return Response(b"".join(parts), media_type="application/json")


def around(payload: object, field: str) -> tuple[bytes, bytes]:
    """Returns the JSON of `payload` before and after the items of its list `field`, which must be empty."""
    head, mark, tail = _encoder.encode(payload).partition(b'"%b":[]' % field.encode())
    assert mark, f"no empty {field}"
    return head + mark[:-1], mark[-1:] + tail


def logprobs_to_write(outputs: Iterable[OutputDelta]) -> int:
    """Returns the number of logprobs that take as long to write as the outputs."""
    return sum(
        (len(tokens) * (1 + len(tokens[-1].top)) if tokens else LOGPROBS_PER_COMPLETION // 2)
        for output in outputs
        for tokens in (output.logprobs, output.prompt_logprobs)
    )


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, or raises its error. Cancels it and raises `ClientDisconnect` if the client
    disconnects first, `ShuttingDownError` if the server stops first.

    The request's body must have been read (`RuntimeError` if not), so that the next ASGI message is the disconnect.
    `receive` is called once: after a disconnect it always returns at once, so a loop would block the event loop.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(receive())
    shutdown = SHUTDOWN.get(None) or Shutdown()
    shutdown.add(working.cancel)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            shutdown.check(working)
            return working.result()
        message = watching.result()
        if message["type"] != "http.disconnect":
            raise RuntimeError(
                f"the request's body was not read to its end: got {message['type']}, not http.disconnect"
            )
        raise ClientDisconnect
    finally:
        shutdown.discard(working.cancel)
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


class EventStream(Response):
    """Sends events as they arrive, and closes their generator when the client disconnects. See `open_event_stream`."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], style: StreamStyle) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=style.media_type)
        del self.headers["Content-Length"]
        self._first = first
        self._events = events
        self._style = style
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(ClientDisconnect):  # the client is gone
                try:
                    await until_disconnect(receive, self._send_all(send))
                except ShuttingDownError as error:
                    if not self._started:
                        raise
                    body = self._style.failed(error)
                    await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for data in self._events:
                # In slices: the connection would copy a long event, and hold all of it until its client reads.
                for start in range(0, len(data), RESPONSE_SLICE):
                    body = data[start : start + RESPONSE_SLICE]
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            last = self._style.done
        except RequestError as error:  # the status has been sent: the last event is the error
            last = self._style.failed(error)
        except ClientDisconnect:
            raise
        except Exception as error:  # a fault of the server
            logger.exception("A stream failed")
            last = self._style.failed(internal_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def open_event_stream(
    request: Request, events: AsyncGenerator[bytes, None], style: StreamStyle = OPENAI_EVENTS
) -> EventStream:
    """Waits for the first event, so that a generation that fails before it gets an ordinary error response. There
    may be no event. Raises errors of `events` before its first event; `ClientDisconnect`."""
    try:
        first = await until_disconnect(request.receive, _first_of(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, style)


async def _first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events, b"")
