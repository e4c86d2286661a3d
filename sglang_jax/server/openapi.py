"""Descriptions of the routes. `/openapi.json`: FastAPI's, with keys, answers and errors added, which FastAPI does not
know: msgspec or dicts write answers, and the handlers write errors. `/docs`: a page that lists the routes, without
scripts, so it works offline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute

from sglang_jax.about import version
from sglang_jax.server.auth import KEY_HEADER, OPEN_PATHS, ROUTES_PATH
from sglang_jax.server.callers import require_admin
from sglang_jax.server.error_shapes import OPENAI, SHAPES, shape_of

JSON, EVENTS, JSON_LINES = "application/json", "text/event-stream", "application/x-ndjson"
BEARER, HEADER = "bearer", "header"

KEYS = {
    BEARER: {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    HEADER: {"type": "apiKey", "in": "header", "name": KEY_HEADER},
}


class GenerateMeta(TypedDict):
    """Data of one completion. Operators get `queue_time` and `sampled_ago`; servers with speculative decoding have
    `spec_*`."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    e2e_latency: float
    weight_version: str
    queue_time: NotRequired[float]
    sampled_ago: NotRequired[list[float]]
    spec_verify_ct: NotRequired[int]
    spec_draft_token_num: NotRequired[int]
    spec_accept_token_num: NotRequired[int]
    input_token_logprobs: NotRequired[list[list[Any]]]
    output_token_logprobs: NotRequired[list[list[Any]]]
    input_top_logprobs: NotRequired[list[list[list[Any]] | None]]
    output_top_logprobs: NotRequired[list[list[list[Any]] | None]]


class GenerateAnswer(TypedDict):
    """One completion; in a stream, all of it so far or, with `incremental_output`, only its next part."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class GenerateEvent(GenerateAnswer):
    """One event of a stream of `/generate`. `index`: the number of its completion, if there are several."""

    index: NotRequired[int]


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    """All served models."""

    object: str
    data: list[ModelCard]


class Tokenized(TypedDict):
    """The ids of one text, or of each text."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Detokenized(TypedDict):
    """The text of one list of ids, or of each list. `prompt`: the text of a single list again, with vLLM's name."""

    text: str | list[str]
    prompt: NotRequired[str]


class TokenizerInfo(TypedDict):
    """Special tokens and chat template, by transformers' names."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


_ANSWERS: dict[Callable[..., Any], tuple[Any, Any, str]] = {}
"""Types of routes' answers by their functions: complete, and as an event of a stream; the stream's media type."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def answers(whole: Any, event: Any = None, media_type: str = EVENTS) -> Callable[[Endpoint], Endpoint]:
    """Declares the types of a route's answers, below the route's decorator. `event`: one event of its stream, if it
    streams, which has this media type."""

    def declare(endpoint: Endpoint) -> Endpoint:
        _ANSWERS[endpoint] = (whole, event, media_type)
        return endpoint

    return declare


class DescribedApp(FastAPI):
    """An application with a complete `/openapi.json`. `asks_for_a_key`: whether all clients need a key."""

    def __init__(self, *, asks_for_a_key: bool, **options: Any) -> None:
        super().__init__(version=version(), **options)
        self._asks_for_a_key = asks_for_a_key
        self._answers: dict[str, tuple[Any, Any, str]] = {}

    def add_routers(self, routers: Sequence[APIRouter]) -> None:
        """Adds routes, and a page that lists them."""
        for router in routers:
            self.include_router(router)
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        self._answers = {route.path_format: _ANSWERS[route.endpoint] for route in routes if route.endpoint in _ANSWERS}
        self.state.routes = {route.path: min(route.methods or {"GET"}) for route in routes if route.include_in_schema}
        rows = [_row(route) for route in routes if route.include_in_schema]
        page = _PAGE.format(title=escape(self.title), rows="\n".join(rows))

        @self.get(ROUTES_PATH, include_in_schema=False)
        async def route_list() -> HTMLResponse:
            return HTMLResponse(page)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            described = super().openapi()
            _describe(described, self._answers, self._asks_for_a_key)
            self.openapi_schema = described
        return self.openapi_schema


def _describe(
    described: dict[str, Any], answers_by_path: dict[str, tuple[Any, Any, str]], asks_for_a_key: bool
) -> None:
    kinds = [kind for whole, event, _ in answers_by_path.values() for kind in (whole, event) if kind is not None]
    errors = [OPENAI.described, *(shape.described for shape in SHAPES.values())]
    described_all, components = msgspec.json.schema_components(
        [*errors, *kinds], ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, [*errors, *kinds]), described_all, strict=True))
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's errors, which are never sent
        schemas.pop(name, None)
    assert not schemas.keys() & components.keys()
    schemas.update(components)
    described["components"]["securitySchemes"] = KEYS
    for path, operations in described["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            if path in answers_by_path:
                whole, streamed, media_type = answers_by_path[path]
                content = {JSON: {"schema": schema_of[repr(whole)]}}
                if streamed is not None:
                    content[media_type] = {"schema": schema_of[repr(streamed)]}
                responses["200"]["content"] = content
            error = schema_of[repr(shape_of(path).described)]
            for status, meaning in _refusals(operation, path not in OPEN_PATHS):
                responses[status] = {"description": meaning, "content": {JSON: {"schema": error}}}
            if path in OPEN_PATHS:
                operation["security"] = []
    described["security"] = [{BEARER: []}, {HEADER: []}] + ([] if asks_for_a_key else [{}])


def _refusals(operation: dict[str, Any], keyed: bool) -> list[tuple[str, str]]:
    refusals = [("default", "Any other error")]
    if "requestBody" in operation:
        refusals.insert(0, ("400", "The request is refused"))
    if keyed:
        refusals.insert(0, ("401", "The API key is missing or wrong"))
    return refusals


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


def _row(route: APIRoute) -> str:
    methods = " ".join(sorted(route.methods or ()))
    description = inspect.getdoc(route.endpoint) or ""
    if any(each.dependency is require_admin for each in route.dependencies):
        description += " Operators only."
    return f"<tr><td><code>{methods} {escape(route.path_format)}</code></td><td>{escape(description)}</td></tr>"
