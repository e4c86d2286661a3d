"""Parses request bodies: JSON of bounded depth and size, whose strings are valid Unicode; long ones in a thread, with
pauses so that others do not wait."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from sglang_jax.engine.fair_threads import FairThreads
from sglang_jax.server.callers import caller_name
from sglang_jax.server.errors import BodyTooComplexError
from sglang_jax.server.streaming import until_disconnect

Result = TypeVar("Result")

PAUSE_FACTOR = 5
"""After a piece of work, no other starts for this many times its duration."""


MAX_OBJECTS = 32_768
"""Maximum objects and lists of a body, and maximum fields of its objects: each costs much more than its bytes."""

MAX_VALUES = 1_048_576
"""Maximum values of a body, including token ids."""

LONG_BODY = 65_536
"""Bodies of more bytes are read as `LongWork`."""

FEW_OBJECTS = 512
"""Bodies with more objects and lists are too: two thousand empty messages, 60 kB, take 5 ms to validate."""

# The kind of each byte in JSON: a quote, an opening or closing bracket, a comma, a colon, or 0 for others.
_QUOTE, _OPEN, _CLOSE, _COMMA, _COLON = range(1, 6)
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b":", _COLON)):
    _KINDS[list(_characters)] = _kind

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_shape(body: bytes, max_depth: int) -> None:
    """Raises `BodyTooComplexError` for JSON that is nested more than `max_depth` levels or has too many parts. Parsing,
    validating and repeating a value blocks the event loop, by its parts and depth more than its bytes. So parts, the
    marks outside of strings, are counted first, all at once."""
    if body.count(b"[") + body.count(b"{") <= max_depth and body.count(b",") < MAX_OBJECTS:
        return  # within the limits even if no mark is in a string
    kinds = _KINDS[np.frombuffer(body.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)]
    kinds = kinds[kinds > 0]
    in_string = np.logical_xor.accumulate(kinds == _QUOTE)
    kinds = kinds[~in_string]  # closing quotes remain and do not matter
    opened = kinds == _OPEN
    depth = int(np.cumsum(opened.astype(np.int8) - (kinds == _CLOSE).astype(np.int8), dtype=np.int32).max(initial=0))
    num_objects, num_fields = np.count_nonzero(opened), np.count_nonzero(kinds == _COLON)
    num_values = np.count_nonzero(kinds == _COMMA) + num_objects
    for what, count, limit in (
        ("levels of nesting", depth, max_depth),
        ("objects and lists", num_objects, MAX_OBJECTS),
        ("fields", num_fields, MAX_OBJECTS),
        ("values", num_values, MAX_VALUES),
    ):
        if count > limit:
            flag = " (--max-json-depth)" if what == "levels of nesting" else ""
            raise BodyTooComplexError(f"the body has {count} {what}; the limit is {limit}{flag}")


_UNREAD: Any = object()


def parse(body: bytes) -> Any:
    """Returns the value of a JSON body. Raises `JSONDecodeError`, also for a string with a lone surrogate: RFC 8259
    (section 8.2) allows its escape, and Python keeps it, but it cannot be encoded, neither for the tokenizer nor for an
    error. The body must be UTF-8: by itself, Python would also accept UTF-16 or UTF-32, which `check_shape` does not
    read, and surrogates in UTF-8."""
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"the bytes are not UTF-8 ({error.reason})", "", error.start) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python limits the digits of integers
        most = sys.get_int_max_str_digits()
        text = body.decode("utf-8-sig")
        place = _first_integer(text, most + 1)
        raise json.JSONDecodeError(f"an integer has more than {most} digits", text, place) from error
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            escape = f"\\u{ord(error.object[error.start]):04x}"
            text = body.decode()
            place = text.lower().find(escape)
            raise json.JSONDecodeError(f"a string contains the lone surrogate {escape}", text, place) from error
    return value


def _first_integer(text: str, digits: int) -> int:
    """Returns the start of the first integer with this many digits; 0 if there is none."""
    found = re.search(rf"[0-9]{{{digits}}}", text)
    return found.start() if found else 0


class JsonRequest(Request):
    """A request whose JSON `parse` reads. `read`: the validated body if it was read already, or its parsing error."""

    read: Any = _UNREAD

    async def json(self) -> Any:
        """Returns the parsed body, or the validated one. Raises `JSONDecodeError`."""
        if isinstance(self.read, json.JSONDecodeError):
            raise self.read
        return parse(await self.body()) if self.read is _UNREAD else self.read

    @property
    def announces_json(self) -> bool:
        """Whether the body's type is JSON."""
        kind, _, subtype = self.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
        return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`, and long bodies as `LongWork`, before FastAPI validates them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            body = await json_request.body()
            if len(body) <= LONG_BODY and body.count(b"{") + body.count(b"[") <= FEW_OBJECTS:
                check_shape(body, request.app.state.max_json_depth)
            else:
                work = partial(self._read, json_request, body)
                turn = long_work(request).run(len(body), work, caller_name())
                json_request.read = await until_disconnect(
                    request.receive, turn
                )  # a client that disconnects frees its body
            return await handle(json_request)

        return handle_json

    def _read(self, request: JsonRequest, body: bytes) -> Any:
        """Returns the validated value of a long body. Raises `BodyTooComplexError`, `RequestValidationError`."""
        check_shape(body, request.app.state.max_json_depth)
        if self.body_field is None or not self._is_json(request):
            return _UNREAD
        try:
            value = parse(body)
        except json.JSONDecodeError as error:
            return error
        checked, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return checked

    def _is_json(self, request: JsonRequest) -> bool:
        """Whether FastAPI reads the body as JSON: on some routes, also if its type is not announced."""
        is_lenient = self.strict_content_type is False
        return request.announces_json or (is_lenient and not request.headers.get("content-type"))


def long_work(request: Request) -> LongWork:
    work: LongWork = request.app.state.long_work
    return work


class LongWork:
    """Runs one piece of work at a time, with a pause after each, in a fair order of tenants and of the pieces of each.
    A thread does not keep the event loop responsive: parsing and validating JSON are single calls that hold Python's
    lock to their end. So long bodies get at most a sixth of the time. Work whose caller is gone does not start."""

    def __init__(self) -> None:
        self._threads = FairThreads(1, "long-bodies", rest=PAUSE_FACTOR)
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "") -> Result:
        """Returns the result of `work` on `size` bytes of a tenant, or raises its error."""
        return await self._threads.run(work, size=size, tenant=tenant, flow=str(next(self._numbers)))
