"""OpenAI's client calls tools on the embedded model; the docs page about tools holds for a tiny model with random
weights, which makes no calls by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.config import Backend
from sglang_jax.engine.model_core import load_core, load_text_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text()
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 5},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris for the next 3 days?"}


OPTIONS: dict[str, Any] = {
    "backend": Backend.TORCH, "device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 4,
    "skip_warmup": True,
}  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def demo() -> Iterator[openai.OpenAI]:
    with serve_echo(load_core, load_text_tokenizer, model_path="demo", context_length=640, **OPTIONS) as server:
        yield from client_of(server)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    more = {"model_path": str(folder), "served_model_name": "demo", "chat_template": CHATML}
    with serve_echo(load_core, load_text_tokenizer, **OPTIONS, **more) as server:
        yield server


@pytest.fixture(scope="module")
def client(tiny: EchoServer) -> Iterator[openai.OpenAI]:
    yield from client_of(tiny)


def client_of(server: EchoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def weather(city: str, days: int) -> str:
    assert city in ("Oslo", "Paris", "Rome")
    assert 1 <= days <= 5
    return f"{days} sunny days in {city}"


def ask(client: openai.OpenAI, messages: list[Any], *, stream: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message, as a client would send it back, and its finish reason."""
    fields = {"model": "demo", "temperature": 0, "max_tokens": 120, "parallel_tool_calls": False, **fields}
    if not stream:
        choice = client.chat.completions.create(messages=messages, **fields).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reason = ""
    for chunk in client.chat.completions.create(messages=messages, stream=True, **fields):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        for call in delta.tool_calls or []:
            known = message.setdefault("tool_calls", [])
            assert call.function is not None
            if call.index == len(known):
                known.append(
                    {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": ""}}
                )
            known[call.index]["function"]["arguments"] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


def test_the_tool_loop_whole_and_as_a_stream(demo: openai.OpenAI) -> None:
    finals = []
    for stream in (False, True):
        messages: list[Any] = [QUESTION]
        message, reason = ask(demo, messages, stream=stream, tools=[WEATHER], tool_choice="required")
        assert reason == "tool_calls"
        messages.append(message)
        assert message["tool_calls"]
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "get_weather"
            said = weather(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        final, reason = ask(demo, messages, stream=stream, tools=[WEATHER], tool_choice="none", max_tokens=5)
        assert reason in ("stop", "length")
        assert final["content"]
        assert "tool_calls" not in final
        finals.append(([call["function"] for call in message["tool_calls"]], final["content"]))
    assert finals[0] == finals[1]


def test_sampled_calls_follow_their_schemas(client: openai.OpenAI) -> None:
    """With several outputs, logprobs, and stop strings that do not occur in a call."""
    answer = client.chat.completions.create(
        model="demo", messages=[QUESTION], tools=[WEATHER], tool_choice="required", n=4, seed=3, temperature=1.5,  # type: ignore
        max_tokens=120, logprobs=True, stop=["\n\n\n"], parallel_tool_calls=False,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        assert weather(**json.loads(call.function.arguments))  # type: ignore[union-attr]
        assert choice.logprobs is not None
        spelt = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or []).decode()
        assert call.function.arguments in spelt  # type: ignore[union-attr]


def test_a_strict_tool_may_be_called(client: openai.OpenAI) -> None:
    """It answers with text, or calls the tool by its schema."""
    message, _ = ask(client, [QUESTION], stream=False, tools=[WEATHER], max_tokens=40)
    for call in message.get("tool_calls", []):
        assert weather(**json.loads(call["function"]["arguments"]))


def test_a_schema_that_cannot_be_enforced_is_a_400_that_names_it(tiny: EchoServer) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "string"}}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}]
    body = {"messages": [QUESTION], "tools": tools, "max_tokens": 5}
    for stream in (False, True):
        response = tiny.http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_grammar", "tools[1].function.parameters")
        assert "/properties/a" in error["message"]


def test_the_requests_of_the_docs_page(tiny: EchoServer) -> None:
    bodies = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    called = []
    for body in bodies:
        response = tiny.http.post("/v1/chat/completions", json=json.loads(body))
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        called.append([call["function"]["name"] for call in message.get("tool_calls", [])])
    assert [names[:1] for names in called] == [["get_weather"], [], ["roll"], []]


def test_the_program_of_the_docs_page(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: client)
    exec(compile(block, "tools.md", "exec"), {})
    first, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"get_weather \{'city': '(Oslo|Paris|Rome)'\}", first)
    assert "".join(rest).strip()
