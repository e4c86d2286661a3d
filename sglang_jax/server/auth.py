"""What is looked at before any route: the API key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.callers import Callers, set_caller
from sglang_jax.server.errors import AuthenticationError, error_response
from sglang_jax.server.route_list import ROUTES_PATH

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""What answers without a key: load balancers and orchestrators have none."""


KEY_HEADER = "x-api-key"
"""Where Anthropic's clients, and some gateways, put the key."""


class HeadAsGet:
    """Answers HEAD as GET. The connection sends no body, because its own scope still says HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class WithoutTrailingSlash:
    """Takes `/v1/completions/` for `/v1/completions`. A redirect would reach clients that do not follow it on POST."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Finds out whose request it is, by `Authorization: Bearer KEY` or `x-api-key: KEY`, on every path but `OPEN_PATHS`
    and the list of routes, which is the same for everybody."""

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
                await error_response(error)(scope, receive, send)
                return
            set_caller(caller)
        await self._app(scope, receive, send)
