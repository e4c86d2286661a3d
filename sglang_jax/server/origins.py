"""Pages in browsers that may read answers: CORS."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.errors import shown
from sglang_jax.server.errors import OriginNotAllowedError, error_response

METHODS = ("GET", "POST", "DELETE")
READABLE_HEADERS = ("Retry-After", "X-Request-Id")
"""Headers of answers that pages may read beyond those that browsers let them read anyway."""


class AllowedOrigins:
    """Answers what browsers ask before a page's request (preflight), and lets pages of some origins read answers.

    A preflight carries no key, so this stands before whatever asks for one. Pages of other origins get no header, and
    their preflights an error that says what would allow them: browsers show it among a page's requests.

    **Arguments:** `origins`: as browsers send them, `https://chat.example.org`; `*` for all; none: no page.
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
                    f"pages of {shown(headers.get('origin', ''))} may not use this server: add that origin to "
                    "--allowed-origins"
                )
                app = error_response(error)
        await app(scope, receive, send)


def is_allowed(headers: Headers, origins: Collection[str]) -> bool:
    """True for the request of a page whose origin is among `origins`."""
    origin = headers.get("origin")
    return origin is not None and ("*" in origins or origin in origins)
