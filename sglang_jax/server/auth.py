"""The API key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.server.errors import AuthenticationError, error_response

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})
"""What answers without a key: load balancers and orchestrators have none."""


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` (RFC 6750, section 2.1) on every path but `OPEN_PATHS`.

    Keys are compared in constant time, so that how long a refusal takes says nothing about the key.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._authorized(scope):
            error = AuthenticationError("this server asks for an API key: send Authorization: Bearer KEY with its key")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)
