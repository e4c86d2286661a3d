"""`/parse_function_call` and `/separate_reasoning`."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.echo_server import EchoServer

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("other", "weather")
]
CALLS: dict[str, Any] = {"text": "a", "tools": TOOLS}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "parser", "normal", "calls"),
    [
        (f"Let me see.{HERMES}", "hermes", "Let me see.", [("weather", 1, '{"city": "Rom"}')]),
        (HERMES * 2, "qwen25", "", [("weather", 1, '{"city": "Rom"}')] * 2),
        (HERMES.replace("weather", "unknown"), "hermes", HERMES.replace("weather", "unknown"), []),
        (HERMES, "mistral", HERMES, []),
        ("no call", None, "no call", []),
        (HERMES, None, "", [("weather", 1, '{"city": "Rom"}')]),
        ('[TOOL_CALLS][{"name": "other", "arguments": {}}]', "mistral", "", [("other", 0, "{}")]),
    ],
)
def test_calls_are_found(server: EchoServer, text: str, parser: str | None, normal: str, calls: list[Any]) -> None:
    body = {"text": text, "tools": TOOLS, "tool_call_parser": parser}
    found = server.http.post("/parse_function_call", json=body).json()
    assert found["normal_text"] == normal
    assert [(one["name"], one["tool_index"], one["parameters"]) for one in found["calls"]] == calls


@pytest.mark.parametrize(
    ("text", "parser", "reasoning", "rest"),
    [
        ("<think>why</think>so", "qwen3", "why", "so"),
        ("why</think>so", "deepseek-r1", "why", "so"),
        ("<think>why</think>\n\nso", "deepseek_r1", "why", "so"),
        ("so", "qwen3", "", "so"),
        ("<|channel|>analysis<|message|>why<|end|><|channel|>final<|message|>so", "gpt_oss", "why", "so"),
    ],
)
def test_reasoning_is_separated(server: EchoServer, text: str, parser: str, reasoning: str, rest: str) -> None:
    found = server.http.post("/separate_reasoning", json={"text": text, "reasoning_parser": parser}).json()
    assert (found["reasoning_text"].strip(), found["text"].strip()) == (reasoning, rest)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/parse_function_call", {"text": "a", "tools": []}, "tools", ["empty"]),
        ("/parse_function_call", {"text": "a", "tools": TOOLS * 100}, "tools", ["128", "200"]),
        (
            "/parse_function_call",
            {"text": "a", "tools": TOOLS, "tool_call_parser": "x"},
            "tool_call_parser",
            ["hermes"],
        ),
        (
            "/parse_function_call",
            {"text": "a", "tools": TOOLS, "tool_call_parser": "none"},
            "tool_call_parser",
            ["none"],
        ),
        ("/parse_function_call", {"text": "a" * (2**18 + 1), "tools": TOOLS}, "text", ["262144"]),
        ("/separate_reasoning", {"text": "a"}, "reasoning_parser", ["qwen3", "--reasoning-parser"]),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": "none"}, "reasoning_parser", ["none"]),
        ("/separate_reasoning", {"reasoning_parser": "qwen3"}, "text", ["required"]),
    ],
)
def test_refusals(server: EchoServer, path: str, body: dict[str, Any], param: str, words: list[str]) -> None:
    answer = server.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert all(word in answer.json()["error"]["message"] for word in words)
