"""What is looked at before any route: the API key, and whether a browser was led here by somebody else's page."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.config import ServerConfig
from sglang_jax.server.callers import Callers, set_caller
from sglang_jax.server.errors import AuthenticationError, ForeignPageError, error_response, shown

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
    """Refuses what a browser sends because a page from elsewhere told it to.

    A server on the loopback interface without a key is protected by being reached from this machine alone, and browsers
    on this machine run everybody's pages. Such a page reaches it by a name of its own that leads here (DNS rebinding),
    which then stands in the `Host` header; or by a request whose answer it cannot read, which browsers mark with
    `Sec-Fetch-Site: cross-site`.

    **Arguments:** `hosts`: names that it may be called by, without a port; `*` among them for any.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if not self._known(host):
                error = ForeignPageError(
                    f"this server without a key does not know the name {shown(host)}: call it localhost, name it in "
                    "--allowed-hosts, or give it an --api-key"
                )
            elif headers.get("sec-fetch-site") == "cross-site":
                error = ForeignPageError("a page from elsewhere asked for this; give the server an --api-key")
            else:
                await self._app(scope, receive, send)
                return
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, host: str) -> bool:
        name = _without_port(host).lower()
        return "*" in self._hosts or name in self._hosts or not host or is_loopback(name)


def only_own_pages(app: ASGIApp, config: ServerConfig, callers: Callers) -> ASGIApp:
    """The application behind `OwnPagesOnly` where that is all its protection: no key, and a loopback address."""
    if callers.asks_for_a_key or not is_loopback(config.host):
        return app
    return OwnPagesOnly(app, [config.host, *(name.strip() for name in (config.allowed_hosts or "").split(","))])


def is_loopback(host: str) -> bool:
    """True for `localhost` and addresses that lead to this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """`[::1]:30000` to `::1`, `localhost:30000` to `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
