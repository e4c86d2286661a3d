"""Middleware that runs before all routes: the API key, HEAD, trailing slashes."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.callers import Callers, set_caller
from sglang_jax.server.errors import AuthenticationError, error_response

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""Paths that need no key, because load balancers and orchestrators have none."""

ROUTES_PATH = "/docs"
"""The list of routes. It needs no key, because a browser does not send one; it shows only what anyone can read in the
source."""

KEY_HEADER = "x-api-key"
"""The header in which Anthropic's clients and some gateways send the key."""


class HeadAsGet:
    """Answers HEAD as GET. The connection sends no body, because its own scope still says HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class WithoutTrailingSlash:
    """Treats `/v1/completions/` as `/v1/completions`. Some clients do not follow a redirect of a POST."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Sets the caller of a request by its `Authorization: Bearer KEY` or `x-api-key: KEY`; refuses unknown keys with
    401. `OPEN_PATHS` and the list of routes, which is the same for all, need no key."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in (*OPEN_PATHS, ROUTES_PATH):
            headers = Headers(scope=scope)
            caller = self._callers.find(headers.get("authorization") or f"Bearer {headers.get(KEY_HEADER, '')}")
            if caller is None:
                error = AuthenticationError(
                    "this server requires an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
            set_caller(caller)
        await self._app(scope, receive, send)
