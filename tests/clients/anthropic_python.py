"""Anthropic's Python client: messages, its stream helper, tools, structured output, thinking, and counts of tokens."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from checks import CAPITAL, KEY, MODEL, NO_SUCH_MODEL, QUESTION, URL, WEATHER, check, is_weather, main, raised
from pydantic import BaseModel, Field

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
CHAT: list[Any] = [{"role": "user", "content": CAPITAL}]
TOOL: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": WEATHER}
SMALLEST_BUDGET = 1024


class Weather(BaseModel):
    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@check
def messages() -> None:
    answer = client.messages.create(
        model=MODEL, system="Be brief.", messages=CHAT, max_tokens=24, stop_sequences=["###"]
    )
    assert (answer.type, answer.role) == ("message", "assistant")
    assert text_of(answer)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0
    assert 0 < answer.usage.output_tokens <= 24


@check
def messages_of_blocks() -> None:
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "My name is Ada."}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello, Ada."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert text_of(client.messages.create(model=MODEL, system=system, messages=talk, max_tokens=8))


@check
def max_tokens() -> None:
    answer = client.messages.create(model=MODEL, messages=[{"role": "user", "content": "Count to 90."}], max_tokens=4)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 4


@check
def stream() -> None:
    with client.messages.stream(model=MODEL, messages=CHAT, max_tokens=24) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(final)
    assert final.stop_reason in ("end_turn", "max_tokens")
    assert final.usage.output_tokens > 0


@check
def raw_events() -> None:
    kinds = [event.type for event in client.messages.create(model=MODEL, messages=CHAT, max_tokens=8, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


@check
def tools() -> None:
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(model=MODEL, messages=question, tools=[TOOL], tool_choice=choice, max_tokens=80)
    assert answer.stop_reason == "tool_use"
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    is_weather(call.input)
    result: Any = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3 sunny days"}],
    }
    talk = [*question, {"role": "assistant", "content": answer.content}, result]
    final = client.messages.create(model=MODEL, messages=talk, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=8)
    assert text_of(final)


@check
def tools_stream() -> None:
    with client.messages.stream(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
        max_tokens=80,
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    is_weather("".join(parts))
    [call] = [block for block in final.content if block.type == "tool_use"]
    is_weather(call.input)


@check
def structured_parse() -> None:
    answer = client.messages.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], output_format=Weather, max_tokens=60
    )
    assert isinstance(answer.parsed_output, Weather)


@check
def thinking() -> None:
    """The chat template of this test starts a reply within its thinking, where the embedded model stays."""
    with client.messages.stream(
        model=MODEL,
        messages=CHAT,
        thinking={"type": "enabled", "budget_tokens": SMALLEST_BUDGET},
        max_tokens=SMALLEST_BUDGET + 8,
        stop_sequences=["."],
    ) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    [block, *_] = final.content
    assert block.type == "thinking"
    assert block.thinking
    assert "".join(pieces) == block.thinking
    assert isinstance(block.signature, str)


@check
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=CHAT, tools=[TOOL])
    answer = client.messages.create(model=MODEL, system="Be brief.", messages=CHAT, tools=[TOOL], max_tokens=1)
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


@check
def errors() -> None:
    refused: list[tuple[type[anthropic.APIStatusError], str, dict[str, Any]]] = [
        (anthropic.NotFoundError, "not_found_error", {"model": NO_SUCH_MODEL}),
        (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": -1}),
        (anthropic.BadRequestError, "invalid_request_error", {"stream": True, "extra_body": {"top_p": 7}}),
    ]
    for kind, name, fields in refused:
        asked = {"model": MODEL, "messages": CHAT, "max_tokens": 4, **fields}
        is_error(raised(kind, lambda asked=asked: client.messages.create(**asked)), name)
    stranger = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    asked = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    is_error(raised(anthropic.AuthenticationError, lambda: stranger.messages.create(**asked)), "authentication_error")


def is_error(error: anthropic.APIStatusError, name: str) -> None:
    assert isinstance(error.body, dict), error
    assert error.body["type"] == "error", error
    assert error.body["error"]["type"] == name, error
    assert error.body["error"]["message"], error


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


main()
