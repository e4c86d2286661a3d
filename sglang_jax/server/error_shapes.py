"""The shapes of errors over HTTP. Routes of another API answer in that API's shape; all others in OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from sglang_jax.errors import RequestError

MAX_MESSAGE_CHARACTERS = 1000
"""Maximum characters of an error's message, which may repeat numbers of thousands of digits."""

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API writes errors. `described`: the type of what `write` returns."""

    write: Callable[[RequestError], dict[str, Any]]
    described: type


class ErrorDetail(TypedDict):
    """What is wrong. `param`: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicError(TypedDict):
    """Anthropic's error object. `type` is `error`; `param` and `code` are this server's additions."""

    type: str
    error: ErrorDetail


class OllamaError(TypedDict):
    """Ollama's error. `param` and `code` are this server's additions."""

    error: str
    param: str | None
    code: str


def _message(error: RequestError) -> str:
    message = error.message
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "..."


def openai_error(error: RequestError) -> dict[str, Any]:
    """Returns `{"error": {"message", "type", "param", "code"}}`."""
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": _message(error), "type": kind, "param": error.param, "code": error.code}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Returns `{"type": "error", "error": {"type", "message"}}`; `param` and `code` are this server's additions."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(error), "param": error.param, "code": error.code},
    }


def ollama_error(error: RequestError) -> dict[str, Any]:
    """Returns `{"error": "message"}`; `param` and `code` are this server's additions."""
    return {"error": _message(error), "param": error.param, "code": error.code}


OPENAI = ErrorShape(openai_error, Error)

SHAPES = {
    "/v1/messages": ErrorShape(anthropic_error, AnthropicError),
    "/api": ErrorShape(ollama_error, OllamaError),
}
"""Shapes of errors by the first part of a path. An API without an entry has OpenAI's."""


def shape_of(path: str) -> ErrorShape:
    """Returns the shape of errors of a path, which may be empty if it is not known."""
    return next((shape for first, shape in SHAPES.items() if f"{path}/".startswith(f"{first}/")), OPENAI)


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """Returns an error as the JSON value that a request for `path` is answered with."""
    return shape_of(path).write(error)
