"""CORS: the web pages that may read answers."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.errors import quote
from sglang_jax.server.errors import OriginNotAllowedError, error_response

METHODS = ("GET", "POST", "DELETE")
READABLE_HEADERS = ("Retry-After", "X-Request-Id")
"""Headers of answers that pages may read in addition to those that browsers always allow."""


class AllowedOrigins:
    """Answers the preflight requests of browsers, and lets pages of `origins` read answers: as browsers send them,
    `https://chat.example.org`; `*` for all; empty for none.

    A preflight has no key, so this middleware runs before the check of keys. Pages of other origins get no CORS header.
    Their preflights get an error that says what would allow them, which browsers show among a page's requests.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        self._shared = CORSMiddleware(
            app,
            allow_origins=tuple(origins),
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=READABLE_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if is_allowed(headers, self._origins):
                app = self._shared
            elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                error = OriginNotAllowedError(
                    f"pages of {quote(headers.get('origin', ''))} may not use this server: add that origin to "
                    "--allowed-origins"
                )
                app = error_response(error, scope["path"])
        await app(scope, receive, send)


def is_allowed(headers: Headers, origins: Collection[str]) -> bool:
    origin = headers.get("origin")
    return origin is not None and ("*" in origins or origin in origins)
