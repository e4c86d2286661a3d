"""Malformed requests: bodies made from the server's OpenAPI description and from valid ones, then broken.

All are made from a seed, so that a request that finds a fault can be reproduced by its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,3}$"}, {"$ref": "#/$defs/d"}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "number", "exclusiveMinimum": 0}},
}
TOOL = {"type": "function", "function": {"name": "get", "description": "x", "parameters": SCHEMA, "strict": True}}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<a"],
        "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}],
        "at_least_one": True,
    },
}
USER = {"role": "user", "content": "hi"}
CALLED = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
CHAT = {"messages": [USER], "max_tokens": 5}
PROMPT = {"prompt": "a", "max_tokens": 5}
SEQUENCE = {"type": "sequence", "elements": [{"type": "regex", "pattern": "a"}, {"type": "any_text"}]}
GBNF = 'root ::= "a" [0-9]'

VALID: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "hello", "sampling_params": {"max_new_tokens": 3, "stop": ["a"]}, "stream": True},
        {"input_ids": [[1, 2], [3]], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        {"text": "a", "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 5}},
        {"text": "a", "sampling_params": {"regex": "(ab|c)+", "max_new_tokens": 5, "min_new_tokens": 2}},
        {"text": ["a", "b"], "sampling_params": [{"ebnf": GBNF}, {"structural_tag": TAGS, "max_new_tokens": 3}]},
        {"text": "a", "session_params": {"id": "s", "rid": None}, "sampling_params": {"max_new_tokens": 2}},
        {"text": "a", "session_params": {"id": "s", "rid": "x", "replace": False}},
    ],
    "/v1/completions": [
        {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "logprobs": 1, "echo": True, "logit_bias": {"5": 1}},
        {"prompt": [1, 2], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "seed": 1},
        {**PROMPT, "guided_json": SCHEMA, "stream": True},
        {**PROMPT, "guided_regex": "[0-9]{3}-x"},
        {**PROMPT, "guided_choice": ["yes", "no"]},
        {**PROMPT, "guided_grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'},
        {**PROMPT, "structured_outputs": {"json": SCHEMA}},
        {**PROMPT, "structured_outputs": {"structural_tag": json.dumps(FORMAT)}},
        {**PROMPT, "structural_tag": {"type": "structural_tag", "format": SEQUENCE}},
        {**PROMPT, "response_format": {"type": "json_object"}},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0.5, "top_p": 0.5},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "x"}], "stream": True},
        {**CHAT, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "stream": True},
        {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get"}}},
        {**CHAT, "tools": [TOOL, {**TOOL, "function": {"name": "set"}}], "tool_choice": "required"},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "4"}]},
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {**CHAT, "response_format": FORMAT, "separate_reasoning": True},
        {**CHAT, "chat_template_kwargs": {"mood": "good", "n": 1, "flags": [True, {"a": None}]}},
        {**CHAT, "guided_json": json.dumps(SCHEMA), "continue_final_message": False},
    ],
    "/open_session": [{"session_id": "s", "capacity_of_str_len": 100, "timeout": 5.0}, {}],
    "/close_session": [{"session_id": "s"}],
    "/start_profile": [{"output_dir": "x", "num_steps": 2}, {}],
    "/stop_profile": [{}],
    "/flush_cache": [{}],
    "/tokenize": [{"prompt": ["a b", "c"], "add_special_tokens": False}],
    "/detokenize": [{"tokens": [[1, 2], [3]], "skip_special_tokens": False}],
    "/abort_request": [{"rid": "x"}],
    "/drain_replica": [{"replica": 0}],
}
"""Valid requests, by path: each field is a place for a fault."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 1e308, -0.0, float("nan"), float("inf"), 1.5),
    *("", "a", "\x00", "\ud800", "\U0001f600", "9" * 5000, "{{ 7 }}", "<|im_start|>system", "a" * 20_000, "\\" * 101),
    *(
        [],
        [[]],
        [None],
        [[], [1]],
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [-1],
        [2**40],
        [0] * 3000,
        ["a"] * 1500,
        [[1]] * 1500,
    ),
    *({}, {"": ""}, {"a": {"b": [{}]}}, {"type": "json_object"}, {"5": float("nan")}, {str(i): 1 for i in range(400)}),
)


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """A request; if it is `raw`, it is sent on a separate connection and `body` is all of it, head included."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw: bool = False


def malformed_requests(description: dict[str, Any], count: int, seed: int = 0) -> Iterator[MalformedRequest]:
    """`description`: the answer of `/openapi.json`."""
    posts = [path for path, operations in description["paths"].items() if "post" in operations]
    paths = [(method.upper(), path) for path, operations in description["paths"].items() for method in operations]
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        path = draw.choice([path for path in posts if path in VALID])
        method, headers, raw = "POST", {"Content-Type": "application/json"}, False
        value = (
            _of_schema(_schema(description, path), description, draw, 0) if draw.random() < 0.3 else _valid(path, draw)
        )
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            value = _with_a_fault(value, draw)
        body = json.dumps(value).encode()
        match draw.randrange(20):
            case 0 | 1 | 2:
                body = _broken(body, draw)
            case 8:
                body = draw.choice((body.decode().encode("utf-16"), body + b" " * 70_000, b"\xef\xbb\xbf" + body))
            case 3:
                headers = {
                    "Content-Type": draw.choice(("text/plain", "", "application/json; charset=utf-16", "a/b;c="))
                }
            case 4:
                method, path = draw.choice(
                    (draw.choice(paths), ("PUT", path), ("DELETE", path), ("GET", path), ("OPTIONS", "*"))
                )
            case 5:
                path += draw.choice(("/", "?a=%00&a=%ff", "%2f..", "/../health", "#", ";a", "%"))
            case 6:
                headers[draw.choice(("X-Routing-Key", "Accept", "Expect", "Cookie", "X-Forwarded-For"))] = draw.choice(
                    ("", "a" * 9000, "\xff", "text/plain; version=a", "\x1b[2J")
                )
            case 7:
                raw, body = True, _raw(path, body, draw)
        yield MalformedRequest(number, method, path, headers, body, raw)


def _schema(description: dict[str, Any], path: str) -> dict[str, Any]:
    body = description["paths"][path]["post"].get("requestBody")  # some routes have no body
    schema: dict[str, Any] = body["content"]["application/json"]["schema"] if body else {}
    return schema


def _valid(path: str, draw: random.Random) -> Any:
    return json.loads(json.dumps(draw.choice(VALID[path])))


def _of_schema(schema: dict[str, Any], description: dict[str, Any], draw: random.Random, depth: int) -> Any:
    """A value that the schema mostly allows."""
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema or "oneOf" in schema:
        return _of_schema(draw.choice(schema.get("anyOf") or schema["oneOf"]), description, draw, depth)
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            chosen = [name for name in fields if name in schema.get("required", ()) or draw.random() < 0.25]
            return {name: _of_schema(fields[name], description, draw, depth + 1) for name in chosen}
        case "array":
            return [_of_schema(schema.get("items", {}), description, draw, depth + 1) for _ in range(draw.randrange(4))]
        case "string":
            return draw.choice(("", "a", "hello there", "user", "text", "\u6771\u4eac", "a" * 300))
        case "integer":
            return draw.choice((0, 1, 2, 5, 16, 100, -1))
        case "number":
            return draw.choice((0, 0.5, 1, 2.0, -1))
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
    return _odd(draw)  # any value is allowed there


def _with_a_fault(value: Any, draw: random.Random) -> Any:
    """The value with an odd value at one place."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice([*value])
        if draw.random() < 0.1:
            return {**value, draw.choice(("", "x", "best_of", "tools", "rid", "__class__", "a" * 3000)): _odd(draw)}
        return {**value, name: _with_a_fault(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        place = draw.randrange(len(value))
        return [*value[:place], _with_a_fault(value[place], draw), *value[place + 1 :]]
    return _odd(draw)


def _odd(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        value: Any = 1
        for _ in range(draw.choice((30, 70, 900))):
            value = [value] if draw.random() < 0.5 else {"a": value}
        return value
    return draw.choice(ODD_VALUES)


def _broken(body: bytes, draw: random.Random) -> bytes:
    """The body with some bytes removed, doubled, changed or inserted."""
    place = draw.randrange(len(body) + 1)
    match draw.randrange(4):
        case 0:
            return body[:place]
        case 1:
            return body[:place] + body[max(0, place - 5) :]
        case 2:
            return body[:place] + draw.randbytes(draw.randrange(1, 4)) + body[place + 1 :]
    return (
        body[:place]
        + draw.choice((b"\\ud800", b"\xed\xa0\x80", b"[", b"}", b"\x00", b"\xff\xfe", b"1" * 5000))
        + body[place:]
    )


def _raw(path: str, body: bytes, draw: random.Random) -> bytes:
    """All bytes of a request whose framing is wrong."""
    length = draw.choice(("Content-Length: -1", "Content-Length: 1e3", f"Content-Length: {len(body)}, 5", "X: y"))
    framing = draw.choice(
        (length, f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked", "Transfer-Encoding: x")
    )
    version = draw.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/2.0", "HTTP/1.0", "", "HTTP/1.1 x"))
    head = f"POST {path} {version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()
    return head + draw.choice((body, b"5\r\nabc", b"zz\r\n" + body, b"1;" + b"e" * 500 + b"\r\na\r\n0\r\n\r\n"))
