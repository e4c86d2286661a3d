"""`/docs`: a page that lists the routes, without scripts, so it works offline. It needs no key, because a browser does
not send one; it shows only what anyone can read in the source."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from html import escape

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute

from sglang_jax.server.callers import require_admin

ROUTES_PATH = "/docs"

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}: routes</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }}
:root {{ color-scheme: light dark }} table {{ border-collapse: collapse }} code {{ white-space: nowrap }}
td, th {{ border-bottom: 1px solid #8884; padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top }}
</style></head>
<body><h1>{title}</h1>
<p>Fields, errors and examples: <code>docs/api.md</code> in the repository. Schema for programs:
<a href="/openapi.json">openapi.json</a>, which needs a key if the server has one.</p>
<table><tr><th>Route</th><th>What it does</th></tr>
{rows}
</table></body></html>
"""


def add_route_list(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Adds to `app` the page that lists these routers' routes."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    rows = [_row(route) for route in routes if route.include_in_schema]
    page = _PAGE.format(title=escape(app.title), rows="\n".join(rows))

    @app.get(ROUTES_PATH, include_in_schema=False)
    async def route_list() -> HTMLResponse:
        return HTMLResponse(page)


def _row(route: APIRoute) -> str:
    methods = " ".join(sorted(route.methods or ()))
    description = inspect.getdoc(route.endpoint) or ""
    if any(each.dependency is require_admin for each in route.dependencies):
        description += " Operators only."
    return f"<tr><td><code>{methods} {escape(route.path_format)}</code></td><td>{escape(description)}</td></tr>"
