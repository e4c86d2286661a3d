"""The web page at `/`: its static files, and `GET /ui/state`, the figures that it polls.

The files hold no data, so they need no key. The page's own requests do, like those of any other client.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import msgspec
from fastapi import APIRouter, Depends, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.about import version
from sglang_jax.server.callers import require_admin
from sglang_jax.server.context import ServerContext
from sglang_jax.server.loads import Load, load_of
from sglang_jax.server.metrics import LatencyHistogram
from sglang_jax.server.streaming import json_response

HTML = "text/html"

MEDIA_TYPES = {
    ".html": f"{HTML}; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

PAGE = "index.html"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content Security Policy: only files of this server, no scripts or styles in the page, and no framing by others."""

GUARDS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: Mapping[str, str]

    def answer(self, known: str) -> Response:
        """`known`: the request's `If-None-Match`."""
        if self.headers["ETag"] in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


class WebPages:
    """Answers GET and HEAD of the page's files: `/ui/NAME`, and `/` for clients whose `Accept` names text/html. Passes
    everything else on, so that programs get the JSON of `/`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        folder = files("sglang_jax.server").joinpath("web")
        found = [each for each in folder.iterdir() if Path(each.name).suffix in MEDIA_TYPES]
        self._files = {f"/ui/{each.name}": _read(each.name, each.read_bytes()) for each in found}
        self._page = self._files.pop(f"/ui/{PAGE}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            headers = Headers(scope=scope)
            found = self._files.get(scope["path"])
            if scope["path"] == "/" and wants_html(headers.get("accept", "")):
                found = self._page
            if found is not None:
                app = found.answer(headers.get("if-none-match", ""))
        await app(scope, receive, send)


def wants_html(accept: str) -> bool:
    """Whether an `Accept` header names text/html, and not with a quality of 0 (RFC 9110, section 12.5.1)."""
    for offer in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in offer.split(";"))
        if media_type == HTML:
            return not any(one.startswith("q=") and one[2:].strip("0.") == "" for one in parameters)
    return False


def _read(name: str, content: bytes) -> _File:
    headers = {
        **GUARDS,
        "Content-Type": MEDIA_TYPES[Path(name).suffix],
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return _File(content, headers | {"Vary": "Accept"} if name == PAGE else headers)


class Latency(msgspec.Struct, kw_only=True):
    """A histogram since the start. `bounds`: upper bounds in seconds; `counts`: values in each bucket, and in a last
    one without a bound."""

    bounds: tuple[float, ...]
    counts: list[int]


class ReplicaFigures(msgspec.Struct, kw_only=True):
    """One replica; counters count since its start."""

    load: Load
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    num_retractions: int
    compiles_after_warm_up: int


class WebState(msgspec.Struct, kw_only=True):
    """`seconds`: the server's monotonic clock, for rates."""

    seconds: float
    version: str
    model: str
    draining: bool
    replicas: list[ReplicaFigures]
    first_token: Latency
    inter_token: Latency
    queue: Latency


def web_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/ui/state", dependencies=[Depends(require_admin)])
    async def state() -> Response:
        """Figures for the page's live view, from each scheduler's newest snapshot."""
        now, metrics = datetime.now(UTC).isoformat(), context.metrics
        replicas = [
            ReplicaFigures(
                load=load_of(one, now),
                prompt_tokens=one.stats.prompt_tokens,
                cached_tokens=one.stats.cached_tokens,
                generation_tokens=one.stats.generation_tokens,
                num_retractions=one.stats.num_retractions,
                compiles_after_warm_up=one.stats.compiles_after_warm_up,
            )
            for one in context.client.loads()
        ]
        return json_response(
            WebState(
                seconds=time.monotonic(),
                version=version(),
                model=context.config.model_name,
                draining=context.draining,
                replicas=replicas,
                first_token=_latency(metrics.first_token),
                inter_token=_latency(metrics.inter_token),
                queue=_latency(metrics.queue_time),
            )
        )

    return router


def _latency(histogram: LatencyHistogram) -> Latency:
    return Latency(bounds=histogram.bounds, counts=histogram.counts)
