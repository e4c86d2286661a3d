"""LiteLLM: the providers for servers with OpenAI's routes, and Anthropic's."""

from __future__ import annotations

from typing import Any

import litellm
from checks import CAPITAL, KEY, MODEL, NO_SUCH_MODEL, QUESTION, URL, WEATHER, check, is_weather, main, raised

CHAT: list[Any] = [{"role": "user", "content": CAPITAL}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
VLLM: dict[str, Any] = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
OLLAMA: dict[str, Any] = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}


def talk(provider: dict[str, Any]) -> None:
    answer = litellm.completion(messages=CHAT, max_tokens=24, temperature=0, **provider)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=CHAT, max_tokens=24, temperature=0, stream=True, **provider))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def call_tool(provider: dict[str, Any]) -> None:
    answer = litellm.completion(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
        **provider,
    )
    [call] = answer.choices[0].message.tool_calls
    is_weather(call.function.arguments)


@check
def chat() -> None:
    talk(OPENAI)


@check
def chat_hosted_vllm() -> None:
    talk(VLLM)


@check
def tools() -> None:
    call_tool(OPENAI)


@check
def structured() -> None:
    answer = litellm.completion(
        messages=[{"role": "user", "content": QUESTION}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": WEATHER, "strict": True},
        },
        max_tokens=60,
        **OPENAI,
    )
    is_weather(answer.choices[0].message.content)


@check
def errors() -> None:
    for kind, fields in (
        (litellm.NotFoundError, {"model": f"openai/{NO_SUCH_MODEL}"}),
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
    ):
        asked = {**OPENAI, "messages": CHAT, **fields}
        raised(kind, lambda asked=asked: litellm.completion(**asked))


@check
def anthropic_messages() -> None:
    talk(ANTHROPIC)


@check
def anthropic_tools() -> None:
    call_tool(ANTHROPIC)


@check
def responses() -> None:
    answer = litellm.responses(input=CAPITAL, max_output_tokens=24, **OPENAI)
    [message] = [item for item in answer.output if item.type == "message"]
    assert message.content[0].text


@check
def ollama() -> None:
    talk(OLLAMA)


main()
