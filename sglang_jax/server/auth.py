"""What is looked at before any route: the API key, and whether a browser was led here by somebody else's page."""

from __future__ import annotations

import ipaddress
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.config import ServerConfig
from sglang_jax.server.callers import Callers, set_caller
from sglang_jax.server.errors import AuthenticationError, ForeignPageError, error_response

OPEN_PATHS = frozenset({"/health"})
"""What answers without a key: load balancers and orchestrators have none."""


class ApiKeyMiddleware:
    """Finds out whose request it is, by `Authorization: Bearer KEY`, on every path but `/health`."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            caller = self._callers.find(Headers(scope=scope).get("authorization", ""))
            if caller is None:
                error = AuthenticationError(
                    "this server asks for an API key: send Authorization: Bearer KEY with its key"
                )
                await error_response(error)(scope, receive, send)
                return
            set_caller(caller)
        await self._app(scope, receive, send)


class OwnPagesOnly:
    """Refuses what a browser sends because another site's page told it to.

    A server on the loopback interface without a key is protected by being reached from this machine alone, and browsers
    on this machine run everybody's pages. Such a page cannot read the answer, but what it asks for would be done.
    Browsers mark such requests with `Sec-Fetch-Site: cross-site`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and Headers(scope=scope).get("sec-fetch-site") == "cross-site":
            error = ForeignPageError("this server has no key, and another site's page asked for this: set --api-key")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def only_own_pages(app: ASGIApp, config: ServerConfig, callers: Callers) -> ASGIApp:
    """The application behind `OwnPagesOnly` where that is all its protection: no key, and a loopback address."""
    return app if callers.asks_for_a_key or not is_loopback(config.host) else OwnPagesOnly(app)


def is_loopback(host: str) -> bool:
    """True for `localhost` and addresses that lead to this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
