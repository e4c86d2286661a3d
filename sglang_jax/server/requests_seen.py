"""What is noted of every HTTP request: its name, in the answer and in the log, and that it was answered."""

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
"""Most characters of a request's id."""

_ID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_REQUEST_ID}}}")
"""What a log line and a header can carry, and nobody can write a line of their own with."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

NO_ROUTE = "none"
"""The route of requests that were answered before one was looked for, or for which there is none: clients choose paths,
and must not choose how many series there are."""


class RequestsSeen:
    """Outermost of all: gives every request an id and counts every answer.

    The id is the client's `X-Request-Id` if that is one, else made up. It is in the answer's header and in all log
    lines that the request leads to.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        REQUEST_ID.set(request_id)  # the task is this request's own: uvicorn makes one for each
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
            # A proxy on this machine says for whom it asks, and may pass on what it was told.
            client = _printable(scope["client"][0]) if scope.get("client") else "unknown"
            fields |= {"client": client}
            path = cut(scope["path"])
            logger.debug(
                "%s %r of %s: %d after %.3f s", method, path, client, status, seconds, extra={"fields": fields}
            )


def _printable(text: str) -> str:
    """What a line of the log can show on a terminal as it is."""
    return cut(text if text.isprintable() else repr(text))


def request_id_of(given: str) -> str:
    """The client's id if a log line can carry it, else one that is made up."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
