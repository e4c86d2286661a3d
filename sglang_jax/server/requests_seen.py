"""Gives every HTTP request an id, for its answer and log lines, and counts its answer."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_jax.errors import cut
from sglang_jax.logs import REQUEST_ID, REQUEST_ID_HEADER
from sglang_jax.server.errors import CLIENT_CLOSED_REQUEST
from sglang_jax.server.metrics import ServerMetrics

logger = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
"""Maximum characters of a request's id."""

_ID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_REQUEST_ID}}}")
"""Ids that log lines and headers can contain safely: without line breaks, no client can forge a log line."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

NO_ROUTE = "none"
"""The route label of requests that match no route or were answered before routing. With paths, clients could create any
number of series."""


class RequestsSeen:
    """Around the whole application: counts every answer, and gives every request an id, the client's `X-Request-Id` if
    that is valid, otherwise a random one. The answer's header and all log lines of the request contain it."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        REQUEST_ID.set(request_id)  # only for this request: uvicorn creates a task for each
        begin = time.perf_counter()
        status = CLIENT_CLOSED_REQUEST

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            self._note(scope, status, time.perf_counter() - begin)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else "other"
        route = scope["route"].path_format if "route" in scope else NO_ROUTE
        self._metrics.http_requests.labels(route, method, str(status)).inc()
        if logger.isEnabledFor(logging.DEBUG):
            fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
            # A proxy may set the client's address to text that a client sent.
            client = _printable(scope["client"][0]) if scope.get("client") else "unknown"
            fields |= {"client": client}
            path = cut(scope["path"])
            logger.debug(
                "%s %r of %s: %d after %.3f s", method, path, client, status, seconds, extra={"fields": fields}
            )


def _printable(text: str) -> str:
    return cut(text if text.isprintable() else repr(text))


def request_id_of(given: str) -> str:
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
