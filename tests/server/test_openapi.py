"""`/openapi.json` against the existing routes, their answers, and OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from helpers.echo_server import EchoServer, serve_echo
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from sglang_jax.about import version

MESSAGES = [{"role": "user", "content": "abc"}]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": "abc", "logprobs": 2}),
    ("/generate", {"text": "abc", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
    ("/generate", {"text": ["abc", "de"]}),
    ("/api/chat", {"model": "default", "messages": MESSAGES, "stream": False, "logprobs": True, "top_logprobs": 2}),
    ("/api/generate", {"model": "default", "prompt": "abc", "stream": False}),
    ("/api/show", {"model": "default"}),
    ("/tokenize", {"prompt": "abc"}),
    ("/tokenize", {"prompt": ["abc", "de"]}),
    ("/detokenize", {"tokens": [97, 98]}),
    ("/detokenize", {"tokens": [[97], [98]]}),
]
INFORMATION = ["/v1/models", "/v1/models/echo-model", "/tokenizer_info", "/api/tags", "/api/ps", "/api/version"]
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


@pytest.fixture(scope="module")
def described(server: EchoServer) -> dict[str, Any]:
    told: dict[str, Any] = server.http.get("/openapi.json").json()
    return told


def faults(described: dict[str, Any], schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Returns where a value differs from its schema: every field that msgspec encodes must be there, and no other."""
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return [] if any(not faults(described, one, value) for one in schema["anyOf"]) else [f"{path}: {value!r}"]
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return [f"{path}: {value!r} is no {schema['type']}"]
    found: list[str] = []
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
        found += [f"{path}.{name} is unknown" for name in value if name not in schema["properties"]]
        for name in value.keys() & schema["properties"].keys():
            found += faults(described, schema["properties"][name], value[name], f"{path}.{name}")
    if isinstance(value, list) and "items" in schema:
        for index, one in enumerate(value):
            found += faults(described, schema["items"], one, f"{path}[{index}]")
    return found


def schema_of(described: dict[str, Any], path: str, method: str, status: str, kind: str = "application/json") -> Any:
    return described["paths"][path][method]["responses"][status]["content"][kind]["schema"]


def test_the_document_is_valid_openapi(described: dict[str, Any]) -> None:
    OpenAPI.model_validate(described)
    assert described["info"]["version"] == version()


def test_every_reference_resolves(described: dict[str, Any]) -> None:
    def references(part: Any) -> list[str]:
        if isinstance(part, list):
            return [one for each in part for one in references(each)]
        if isinstance(part, dict):
            own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
            return own + references(list(part.values()))
        return []

    found = references(described)
    assert {one.rpartition("/")[2] for one in found} <= described["components"]["schemas"].keys()
    assert not {one for one in found if "ValidationError" in one}


@pytest.mark.parametrize(("path", "body"), CASES)
def test_answers_are_as_described(server: EchoServer, described: dict[str, Any], path: str, body: Any) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert faults(described, schema_of(described, path, "post", "200"), answer.json()) == []


@pytest.mark.parametrize(("path", "body"), CASES[:4])
def test_events_are_as_described(server: EchoServer, described: dict[str, Any], path: str, body: Any) -> None:
    schema = schema_of(described, path, "post", "200", "text/event-stream")
    usage = {"stream_options": {"include_usage": True}} if path.startswith("/v1") else {}
    for told in server.events(path, {**body, **usage}):
        assert faults(described, schema, told) == []


@pytest.mark.parametrize("path", INFORMATION)
def test_information_routes_answer_as_described(server: EchoServer, described: dict[str, Any], path: str) -> None:
    schema = schema_of(described, path.replace("echo-model", "{model}"), "get", "200")
    assert faults(described, schema, server.http.get(path).json()) == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ChatCompletion", ChatCompletion),
        ("ChatChunk", ChatCompletionChunk),
        ("Completion", Completion),
        ("ModelCard", Model),
    ],
)
def test_fields_that_openai_requires_are_required(described: dict[str, Any], name: str, known: type[BaseModel]) -> None:
    required = {name for name, field in known.model_fields.items() if field.is_required()}
    assert required <= set(described["components"]["schemas"][name]["properties"])


def test_every_route_that_reads_a_body_refuses_it_as_described(server: EchoServer, described: dict[str, Any]) -> None:
    read = [
        (path, method, operation)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    ]
    assert ("/generate", "post") in [(path, method) for path, method, _ in read]
    for path, method, operation in read:
        assert "422" not in operation["responses"]
        answer = server.http.request(method, path, content="[", headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert faults(described, schema_of(described, path, method, "400"), answer.json()) == [], path


def test_keys_are_required_where_the_document_says_so() -> None:
    with serve_echo(api_key="sesame") as server:
        described = server.http.get("/openapi.json", headers={"X-Api-Key": "sesame"}).json()
        schemes = described["components"]["securitySchemes"]
        assert [list(one) for one in described["security"]] == [["bearer"], ["header"]]
        headers = [{"Authorization": f"{schemes['bearer']['scheme']} sesame"}, {schemes["header"]["name"]: "sesame"}]
        for path, operations in described["paths"].items():
            for method, operation in operations.items():
                answer = server.http.request(method, path)
                asks = operation.get("security", described["security"]) != []
                assert (answer.status_code == 401) == asks, path
                if asks:
                    assert faults(described, schema_of(described, path, method, "401"), answer.json()) == []
        assert [server.http.get("/v1/models", headers=each).status_code for each in headers] == [200, 200]


def test_a_server_without_keys_describes_no_security(described: dict[str, Any]) -> None:
    assert {} in described["security"]
