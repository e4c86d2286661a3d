"""OpenAI's agents: a tool is called and its result answered, over responses (the default) and over chats."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.models.interface import Model
from checks import CAPITAL, KEY, MODEL, QUESTION, URL, check, main
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
FEW = ModelSettings(max_tokens=80, temperature=0)
asked: list[str] = []


@function_tool(is_enabled=lambda _context, _agent: not asked)
def get_weather(city: str, days: int) -> str:
    """The weather of a city. It may be asked once, so that a small model ends."""
    asked.append(city)
    return f"{days} sunny days in {city}"


def model(kind: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> Model:
    return kind(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))


async def run_agent(kind: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> None:
    forced = ModelSettings(max_tokens=80, temperature=0, tool_choice="required", parallel_tool_calls=False)
    agent = Agent("forecaster", instructions="Be brief.", model=model(kind), tools=[get_weather], model_settings=forced)
    asked.clear()
    result = await Runner.run(agent, QUESTION, max_turns=3, run_config=RunConfig(tracing_disabled=True))
    assert asked
    assert isinstance(result.final_output, str)
    assert result.context_wrapper.usage.requests >= 2
    assert result.context_wrapper.usage.output_tokens > 0


async def stream_agent(kind: type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]) -> None:
    result = Runner.run_streamed(
        Agent("geographer", instructions="Be brief.", model=model(kind), model_settings=FEW), CAPITAL
    )
    pieces = []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            pieces.append(event.data.delta)
    assert len(pieces) > 1
    assert "".join(pieces) == result.final_output


@check
def chat_tools() -> None:
    asyncio.run(run_agent(OpenAIChatCompletionsModel))


@check
def chat_stream() -> None:
    asyncio.run(stream_agent(OpenAIChatCompletionsModel))


@check
def responses_tools() -> None:
    asyncio.run(run_agent(OpenAIResponsesModel))


@check
def responses_stream() -> None:
    asyncio.run(stream_agent(OpenAIResponsesModel))


main()
