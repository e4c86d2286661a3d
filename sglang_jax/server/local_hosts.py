"""Protects a server without a key that only this machine can reach: the host names and web pages that may call it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.errors import quote
from sglang_jax.server.errors import ForeignPageError, HostNotAllowedError, error_response
from sglang_jax.server.origins import is_allowed


class LocalHosts:
    """Refuses requests whose `Host` is not this machine or one of `names` (`*` for all), for a server that only this
    machine can reach. A web page may resolve its own name to 127.0.0.1 (DNS rebinding) and then talk, in its visitor's
    browser, to a server that trusts all local clients. Its requests have the page's host."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), *(name.strip().lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not self._allowed(_without_port(host).lower()):
                error = HostNotAllowedError(
                    f"this server has no key and listens only on this machine, but was called as {quote(host)}; "
                    "add that host to --allowed-hosts, or set --api-key"
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allowed(self, name: str) -> bool:
        return not name or name in self._names or "*" in self._names or name.endswith(".localhost") or is_address(name)


class OwnPagesOnly:
    """Refuses requests that a browser sends for another site's page, except of `origins`, as for `AllowedOrigins`.

    A server on the loopback interface without a key is protected only by being local, but local browsers run pages of
    any site. Such a page cannot read the answer, but its request would be executed. Browsers mark such requests with
    `Sec-Fetch-Site: cross-site`. A link to `/` may be followed: the answer fills the window, and has no effect.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            foreign = headers.get("sec-fetch-site") == "cross-site" and not _opens_start(scope, headers)
            if foreign and not is_allowed(headers, self._origins):
                error = ForeignPageError(
                    "this server has no key, and a page of another site sent this request: add the page's origin to "
                    "--allowed-origins, or set --api-key"
                )
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _opens_start(scope: Scope, headers: Headers) -> bool:
    """Whether a window, not a frame, opens `/`."""
    return scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-dest") == "document"


def is_address(name: str) -> bool:
    """Whether a name is an IP address, which a page cannot use as its own name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a listening address cannot be reached from other machines."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def _without_port(host: str) -> str:
    """Returns `localhost` for `localhost:30000`, `::1` for `[::1]:30000`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
