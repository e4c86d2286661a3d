"""How bodies are parsed: JSON whose strings are all Unicode text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonRequest(Request):
    """A request whose JSON holds no half of a surrogate pair.

    RFC 8259 (section 8.2) lets a string escape one half alone. Python keeps it, but such a string cannot be encoded:
    not for the tokenizer, and not for an error that repeats it.
    """

    async def json(self) -> Any:
        """The parsed body. Raises `JSONDecodeError`."""
        try:
            value = await super().json()
        except UnicodeDecodeError as error:
            raise json.JSONDecodeError(f"the bytes are not UTF-8 ({error.reason})", "", error.start) from error
        body = await self.body()
        if _SURROGATE.search(body):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                escape = f"\\u{ord(error.object[error.start]):04x}"
                text = body.decode()
                place = text.lower().find(escape)
                raise json.JSONDecodeError(f"a string holds half a surrogate pair, {escape}", text, place) from error
        return value


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI's `APIRoute`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
