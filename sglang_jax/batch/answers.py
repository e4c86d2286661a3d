"""Sends lines to the server's application in this process, and converts its responses to OpenAI's output format."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec
from msgspec import Raw
from starlette.types import ASGIApp, Message, Scope

from sglang_jax.batch.journal import Kind, line_id
from sglang_jax.batch.lines import BadLine, Line

logger = logging.getLogger(__name__)

TRANSIENT_CODES = frozenset({"engine_dead", "unavailable"})
"""Error codes that the line did not cause: it is retried."""

BUSY_CODES = frozenset({"queue_full", "busy", "shutting_down", "rate_limit_exceeded"})
"""Error codes of a server without room for the line: it is sent again, however often, but never as another line's
fault."""

_ADDRESS = ("batch", 0)


class _ErrorObject(msgspec.Struct):
    code: str | None
    message: str


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: Raw


class _OutputLine(msgspec.Struct):
    """A line of OpenAI's output format. A line that the server refused has both a response and an error."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _ErrorObject | None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token counts of an answer."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class _Usage(msgspec.Struct):
    """Token counts by the names of the routes. Details are None for callers who are not told what was cached.
    `cache_read_input_tokens`: only of messages, whose `input_tokens` do not include them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None
    input_tokens_details: _CachedTokens | None = None
    cache_read_input_tokens: int | None = None

    def counted(self) -> Tokens:
        details = self.prompt_tokens_details or self.input_tokens_details or _CachedTokens()
        apart = self.cache_read_input_tokens or 0
        return Tokens(
            self.prompt_tokens + self.input_tokens + apart,
            details.cached_tokens + apart,
            self.completion_tokens + self.output_tokens,
        )


class _MetaInfo(msgspec.Struct):
    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class _OpenAIBody(msgspec.Struct):
    id: str
    usage: _Usage


class _NativeBody(msgspec.Struct):
    meta_info: _MetaInfo


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject


_openai = msgspec.json.Decoder(_OpenAIBody)
_native = msgspec.json.Decoder(list[_NativeBody])
_error = msgspec.json.Decoder(_ErrorBody)
_written = msgspec.json.Decoder(_OutputLine)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished line, ready to be written."""

    kind: Kind
    line: bytes
    tokens: Tokens = Tokens()


@dataclass(frozen=True, slots=True)
class AppReply:
    status: int
    body: bytes

    @property
    def transient(self) -> bool:
        """Whether it is an error that the line did not cause."""
        return self.status >= 500 and _error.decode(self.body).error.code in TRANSIENT_CODES

    @property
    def busy(self) -> bool:
        """Whether the server has no room for the line at the moment."""
        return self.status in (429, 503) and _error.decode(self.body).error.code in BUSY_CODES


async def post(app: ASGIApp, line: Line) -> AppReply:
    exchange = _Exchange(line.body)
    try:
        await app(_scope(line.url), exchange.receive, exchange.send)
    except Exception:
        # After a handler's error, Starlette answers with status 500 and raises the error again, for the server to log.
        if not exchange.ended:
            raise
        logger.exception("Line %d failed", line.number + 1)
    return AppReply(exchange.status, b"".join(exchange.parts))


class _Exchange:
    """One call of an ASGI application (specification 3.0), by a client that never disconnects."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.parts: list[bytes] = []
        self.ended = False

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # blocks until the application stops asking
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.parts.append(message.get("body", b""))
        self.ended = not message.get("more_body", False)


def _scope(path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": _ADDRESS,
        "server": _ADDRESS,
    }


def answer_of(line: Line, reply: AppReply) -> Answer:
    """Returns the output line of a response; an error line for any status except 200."""
    if reply.status != 200:
        error = _error.decode(reply.body).error
        response = _Response(reply.status, line_id(line.number), Raw(reply.body))
        return Answer(Kind.ERROR, _encode_line(line.number, line.custom_id, response, error))
    request_id, tokens = _read_usage(reply.body)
    response = _Response(reply.status, request_id, Raw(reply.body))
    return Answer(Kind.OUTPUT, _encode_line(line.number, line.custom_id, response, None), tokens)


def error_answer(line: Line | BadLine, code: str, message: str) -> Answer:
    """Returns the error line of a line without a response."""
    return Answer(Kind.ERROR, _encode_line(line.number, line.custom_id, None, _ErrorObject(message=message, code=code)))


def tokens_of(line: bytes) -> Tokens:
    """Returns the token counts of a line of an output file."""
    response = _written.decode(line).response
    return Tokens() if response is None else _read_usage(bytes(response.body))[1]


def _encode_line(number: int, custom_id: str | None, response: _Response | None, error: _ErrorObject | None) -> bytes:
    return _encoder.encode(_OutputLine(line_id(number), custom_id, response, error)) + b"\n"


def _read_usage(body: bytes) -> tuple[str, Tokens]:
    """Returns the id and token counts of a response. The native route has no id for a whole response, so the first
    completion's is used; its prompt tokens count once per completion."""
    if body.startswith(b'{"id"'):
        answer = _openai.decode(body)
        return answer.id, answer.usage.counted()
    outputs = [one.meta_info for one in _native.decode(body if body.startswith(b"[") else b"[%b]" % body)]
    return outputs[0].id, Tokens(
        sum(one.prompt_tokens for one in outputs),
        sum(one.cached_tokens or 0 for one in outputs),
        sum(one.completion_tokens for one in outputs),
    )
