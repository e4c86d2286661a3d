"""How bodies are parsed: JSON whose strings are all Unicode text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from sglang_jax.server.callers import caller_name
from sglang_jax.server.errors import BodyTooComplexError
from sglang_jax.server.long_work import LongWork
from sglang_jax.server.streaming import until_disconnect

MAX_OBJECTS = 32_768
"""Most objects and lists of a body, and most fields of its objects: each costs much more than its bytes."""

MAX_VALUES = 1_048_576
"""Most values of a body, token ids and all."""

LONG_BODY = 65_536
"""Bodies of more bytes are read as `LongWork`."""

FEW_OBJECTS = 512
"""So are those of more objects and lists: two thousand empty messages of 60 kB take 5 ms to check."""

# What a byte is to the shape of JSON: a quote, an opening or a closing bracket, a comma, a colon, or nothing.
_QUOTE, _OPEN, _CLOSE, _COMMA, _COLON = range(1, 6)
_KINDS = np.zeros(256, np.uint8)
for _characters, _kind in ((b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b":", _COLON)):
    _KINDS[list(_characters)] = _kind

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_shape(body: bytes, max_depth: int) -> None:
    """Raises `BodyTooComplexError` for JSON that is nested too deeply, or made of more parts than it has room for.

    Parsing, checking and repeating a value costs by its parts and depth, not by its bytes, and holds up all else
    meanwhile. So they are counted first, all at once, by what cannot be text: marks outside of strings.

    **Arguments:** `max_depth`: deepest nesting of objects and lists.
    """
    if body.count(b"[") + body.count(b"{") <= max_depth and body.count(b",") < MAX_OBJECTS:
        return  # whatever of it is text: it is neither deep nor many
    kinds = _KINDS[np.frombuffer(body.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)]
    kinds = kinds[kinds > 0]
    in_string = np.logical_xor.accumulate(kinds == _QUOTE)
    kinds = kinds[~in_string]  # closing quotes are left; they say nothing
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
    """The JSON of a body. Raises `JSONDecodeError`, for a string with half of a surrogate pair too.

    RFC 8259 (section 8.2) lets a string escape one half alone. Python keeps it, but such a string cannot be encoded:
    not for the tokenizer, and not for an error that repeats it. Nor may it be spelt out: by itself Python would take
    bytes for UTF-16 or UTF-32, which `check_shape` does not read, and half a pair for UTF-8.
    """
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"the bytes are not UTF-8 ({error.reason})", "", error.start) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python reads integers up to a number of digits
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
    """Where the first one begins that has so many digits; 0 if there is none."""
    found = re.search(rf"[0-9]{{{digits}}}", text)
    return found.start() if found else 0


class JsonRequest(Request):
    """A request whose JSON `parse` reads. `read`: what was made of the body already, or why nothing could be made of
    it."""

    read: Any = _UNREAD

    async def json(self) -> Any:
        """The parsed body; or what the route takes it for, which is checked. Raises `JSONDecodeError`."""
        if isinstance(self.read, json.JSONDecodeError):
            raise self.read
        return parse(await self.body()) if self.read is _UNREAD else self.read

    @property
    def announces_json(self) -> bool:
        """Whether FastAPI reads the body as JSON."""
        kind, _, subtype = self.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
        return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`; a long one is parsed and checked as `LongWork`, and FastAPI finds
    that there is nothing left to check."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's `APIRoute`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            json_request = JsonRequest(request.scope, request.receive)
            body = await json_request.body()
            if len(body) <= LONG_BODY and body.count(b"{") + body.count(b"[") <= FEW_OBJECTS:
                check_shape(body, request.app.state.max_json_depth)
            else:
                work = partial(self._read, json_request, body)
                turn = long_work(request).run(len(body), work, caller_name())
                json_request.read = await until_disconnect(request.receive, turn)  # who leaves holds no body
            return await handle(json_request)

        return handle_json

    def _read(self, request: JsonRequest, body: bytes) -> Any:
        """What the route takes a long body for. Raises `BodyTooComplexError`, `RequestValidationError`."""
        check_shape(body, request.app.state.max_json_depth)
        if self.body_field is None or not request.announces_json:
            return _UNREAD
        try:
            value = parse(body)
        except json.JSONDecodeError as error:
            return error
        checked, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return checked


def long_work(request: Request) -> LongWork:
    """That of the application which answers the request."""
    work: LongWork = request.app.state.long_work
    return work
