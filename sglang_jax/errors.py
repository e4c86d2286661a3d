"""Errors that cross packages, with their HTTP status and code."""

from __future__ import annotations

import reprlib

SHOWN_LENGTH = 100
"""Maximum characters of a value that an error message shows."""

_short = reprlib.Repr()
_short.maxlevel, _short.maxother = 3, SHOWN_LENGTH
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 10
_short.maxstring = _short.maxlong = SHOWN_LENGTH // 2


def quote(value: object) -> str:
    """Returns a value for an error message: its repr, truncated. The cost does not depend on its size."""
    if isinstance(value, (str, list)) and len(value) > SHOWN_LENGTH:
        return f"{cut(_short.repr(value))} ({len(value)} long)"
    return repr(value) if isinstance(value, str) else cut(_short.repr(value))


def cut(text: str) -> str:
    """Returns a client's name or text for an error message, truncated."""
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."


class RequestError(Exception):
    """A request that cannot be served; other requests are not affected. `message` names the value and the limit;
    `param` is the invalid field or None; `code` is a stable machine-readable word; `status` is the HTTP status."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ParameterError(RequestError, ValueError):
    """A field has a value of the wrong type or outside its range."""

    code = "invalid_value"


class GrammarError(RequestError):
    """A grammar cannot be compiled, exceeds a request's limits, or uses an unknown feature."""

    code = "invalid_grammar"


class GrammarUnavailableError(RequestError):
    """Grammars cannot be compiled at the moment; this one may be valid."""

    status = 503
    code = "grammar_unavailable"


class PromptTooLongError(RequestError):
    """The prompt does not fit the context, or leaves no room for a requested output token."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class QueueFullError(RequestError):
    """`max_queued_requests` requests are already queued."""

    status = 503
    code = "queue_full"


class SessionNotFoundError(RequestError):
    """The session was never opened, is closed, has timed out, was lost with its engine, or belongs to another key."""

    status = 404
    code = "session_not_found"


class SessionBusyError(RequestError):
    """The session already has a running turn."""

    code = "session_busy"


class SessionLimitError(RequestError):
    """`max_sessions` sessions are already open."""

    status = 503
    code = "too_many_sessions"


class MemoryReleasedError(RequestError):
    """The engine has given back the memory of its weights or its KV cache, until an operator resumes it."""

    status = 503
    code = "memory_released"


class AbortedError(RequestError):
    """The request was aborted before its vector or its scores were computed. Aborted texts end without an error."""

    code = "aborted"


class CapacityError(RequestError):
    """A request by itself needs more KV than the pool holds."""

    status = 500
    code = "kv_capacity_exceeded"


class UnreadError(RequestError):
    """The client does not read its output, and too much unread output is waiting."""

    status = 408
    code = "output_not_read"


class NumericalError(RequestError):
    """The model's logits for this request are not finite."""

    status = 500
    code = "non_finite_logits"


class EngineDeadError(RequestError):
    """The engine process has ended; requests in flight are lost. `started`: whether the engine had started the request,
    None if that is not known. If not, another engine can run it instead."""

    status = 500
    code = "engine_dead"

    def __init__(self, message: str, *, started: bool | None = False) -> None:
        super().__init__(message)
        self.started = started


class ReplicaLostError(EngineDeadError):
    """The replica that ran the request was lost; others serve, so the request may be sent again."""

    status = 503
    code = "replica_lost"


def how_to_install(*extras: str) -> str:
    """Returns the command that installs extras from the clone: PyPI's `sglang-jax` is another project."""
    return f"pip install -e '.[{','.join(extras)}]' in the clone of this project"


class CheckpointError(Exception):
    """A checkpoint cannot be read; the message names the file or tensors and the remedy."""


class ConfigError(ValueError):
    """An invalid option, or a combination of options that the engine does not support."""


class NoRoomError(ConfigError):
    """Options that need more device memory than there is."""


class BatchError(Exception):
    """An offline batch cannot start or continue; the message says why and what to do."""
