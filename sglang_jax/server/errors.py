"""Errors over HTTP: OpenAI's error object, or the one of the route's API (`error_shapes.py`)."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sglang_jax.config.suggestions import MIN_SIMILARITY
from sglang_jax.errors import ParameterError, RequestError, cut, quote
from sglang_jax.server.error_shapes import error_body

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status recorded for a client that disconnected (nginx's number); it is not sent."""

RETRY_AFTER_SECONDS = 1

LINGER_SECONDS = 2.0
"""Seconds that a refused client has to read its answer and close. If the server closed first, with bytes unread, the
kernel would send a reset, and the client would lose the answer."""

MAX_LINGERED_BYTES = 4 * 2**20
"""Maximum bytes of a refused body that are read and discarded."""

MAX_COMPARED_CHARACTERS = 100
"""Maximum characters of an unknown path that is compared with the routes."""

NOTE_ERROR: ContextVar[Callable[[RequestError], None] | None] = ContextVar("note_error", default=None)
"""Called with the error with which the current request fails, if anyone wants to know it."""

INSTEAD = {
    "/v1/files": "start the server with --files-dir, or run `sglang-jax batch` on a file",
    "/v1/batches": "start the server with --files-dir, or run `sglang-jax batch` on a file",
    **dict.fromkeys(
        [f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete", "blobs")],
        "this server serves the model that it was started with, and clients cannot change it",
    ),
    **dict.fromkeys(["/api/embed", "/api/embeddings"], "use POST /v1/embeddings"),
    "/embeddings": "add /v1 to the base URL: POST /v1/embeddings",
    "/chat/completions": "add /v1 to the base URL: POST /v1/chat/completions",
    "/completions": "add /v1 to the base URL: POST /v1/completions",
    "/models": "add /v1 to the base URL: GET /v1/models",
    "/v1/moderations": "this server only generates text",
    "/v1/audio": "this server only generates text",
    "/v1/images": "this server only generates text",
}
"""Alternatives to routes that clients ask for and this server does not have, and to those below them."""


class MalformedRequestError(RequestError):
    """The body is not what the route reads."""

    code = "malformed_request"


class BodyTooComplexError(RequestError):
    """The body's JSON is nested too deeply, or has too many parts."""

    code = "body_too_complex"


class BodyTooLargeError(RequestError):
    """The body has more bytes than `max_body_bytes`."""

    status = 413
    code = "body_too_large"


class FileNotFoundHereError(RequestError):
    """There is no file with this id that the caller may see."""

    status = 404
    code = "file_not_found"


class FileInUseError(RequestError):
    """A batch reads the file."""

    code = "file_in_use"


class FileTooLargeError(RequestError):
    """The file has more bytes than `max_file_bytes`."""

    status = 413
    code = "file_too_large"


class StorageFullError(RequestError):
    """The files of all clients, or of this one, have as many bytes as they may."""

    status = 413
    code = "storage_full"


class StorageError(RequestError):
    """The disk fails, or has no room although the limits would allow it."""

    status = 503
    code = "storage_unavailable"


class ClientTooSlowError(RequestError):
    """The client stopped sending its body, or sends it too slowly."""

    status = 408
    code = "client_too_slow"


class BusyError(RequestError):
    """There is no memory left for the request's head or body, or for its answer."""

    status = 503
    code = "busy"


class HostNotAllowedError(RequestError):
    """A server without a key, only for this machine, was called by another machine's name."""

    status = 403
    code = "host_not_allowed"


class TooManyConnectionsError(RequestError):
    """`max_connections` are open, and not one of them is idle."""

    status = 503
    code = "too_many_connections"


class MediaTypeError(RequestError):
    """The body is announced as something other than JSON, or as compressed."""

    status = 415
    code = "unsupported_media_type"


class UnsupportedParameterError(RequestError):
    """A field asks for a feature that this server does not have, and ignoring it would change the result."""

    code = "unsupported_parameter"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class AdminKeyError(RequestError):
    """The key is not an operator's."""

    status = 403
    code = "admin_key_required"


class ForeignPageError(RequestError):
    """A page of another site made a browser call a server that has no key."""

    status = 403
    code = "foreign_page"


class OriginNotAllowedError(RequestError):
    """A browser asks for an origin whose pages may not use this server."""

    status = 403
    code = "origin_not_allowed"


class RateLimitError(RequestError):
    """The key's limit of completions in flight, or of tokens per minute, is reached. `retry_after`: seconds to wait."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ResponseNotFoundError(RequestError):
    """There is no stored response with this id for this key."""

    status = 404
    code = "response_not_found"


class ShuttingDownError(RequestError):
    """The server is stopping: requests in flight finish, new ones are refused."""

    status = 503
    code = "shutting_down"


class UnavailableError(RequestError):
    """A health check failed: the engine has ended or does not answer."""

    status = 503
    code = "unavailable"


def internal_error(error: Exception) -> RequestError:
    """Returns the error that a client gets for a fault of the server."""
    refusal = RequestError(f"the server failed ({type(error).__name__}); see its log", code="internal_error")
    refusal.status = 500
    return refusal


def note_error(error: RequestError) -> None:
    if (note := NOTE_ERROR.get()) is not None:
        note(error)


def error_response(error: RequestError, path: str = "") -> Response:
    """Returns the answer to a request for `path`."""
    note_error(error)
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, RateLimitError):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
    return Response(msgspec.json.encode(error_body(error, path)), error.status, headers, "application/json")


async def close_after_error(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with an error, reads and discards the rest of its body, and closes its connection: at the
    latest after `LINGER_SECONDS` or `MAX_LINGERED_BYTES`."""
    response = error_response(error, scope["path"])
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            left = MAX_LINGERED_BYTES
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
    await send({"type": "http.response.body", "body": b""})


ONE = "<one>"
"""The union branch of a single value, if a list of values is allowed too."""


def field_path(location: Sequence[int | str]) -> str:
    """`messages[0].content` for pydantic's ("body", "messages", 0, "content"); names in <> are union branches."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("<", "[")):
            name = cut(part)
            path += f".{name}" if path else name
    return path


def validation_error(errors: Sequence[Mapping[str, Any]], content_type: str | None) -> RequestError:
    """Returns the first of pydantic's errors as a sentence: the field, what is expected, and the value received."""
    first = errors[0]
    path, value = field_path(first["loc"]), first["input"]
    if first["type"] == "json_invalid":
        return MalformedRequestError(
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}",
            code="malformed_json",
        )
    if isinstance(value, bytes):
        return MediaTypeError(f"the body must be sent as Content-Type: application/json, got {quote(content_type)}")
    if first["type"] == "missing":
        return ParameterError(f"{path or 'a JSON body'} is required", param=path or None, code="missing_field")
    if not path:
        return MalformedRequestError(f"the body must be a JSON object, got {quote(value)}")
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, RequestError):  # raised by a validator of this server
        return refusal
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    several = ", or a list of these" if first["loc"][-1] == ONE else ""
    return ParameterError(f"{path}: {first['msg']}{several}, got {quote(value)}{more}", param=path)


def _no_route(request: Request) -> str:
    path = request.url.path
    wanted = path.rstrip("/")
    hint = next((use for route, use in INSTEAD.items() if f"{wanted}/".startswith(f"{route}/")), None)
    return f"there is no route {request.method} {cut(path)}: {hint or _nearest(request.app.state.routes, wanted)}"


def _nearest(methods: Mapping[str, str], wanted: str) -> str:
    """Names the most similar route, if one is similar and the path is short enough to compare. `methods`: the method of
    each route, by its path."""
    if len(wanted) <= MAX_COMPARED_CHARACTERS:
        for path in difflib.get_close_matches(wanted, methods, n=1, cutoff=MIN_SIMILARITY):
            return f"did you mean {methods[path]} {path}? GET /docs lists all"
    return "GET /docs lists them"


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of a request an error object. `app.state.routes`: the method of each route, by its path."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error, request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        refusal = validation_error(error.errors(), request.headers.get("content-type"))
        return error_response(refusal, request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        match error.status_code:
            case 404:
                code, message = "not_found", _no_route(request)
            case 405:
                code, message = "method_not_allowed", f"{cut(request.url.path)} does not answer {request.method}"
            case _:
                code, message = "invalid_request", error.detail
        refusal = RequestError(message, code=code)
        refusal.status = error.status_code
        response = error_response(refusal, request.url.path)
        response.headers.update(error.headers or {})
        return response

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def broken(request: Request, error: Exception) -> Response:
        return error_response(internal_error(error), request.url.path)

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, broken)
