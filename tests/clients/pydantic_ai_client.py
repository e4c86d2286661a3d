"""Pydantic AI: agents over OpenAI's chats and responses, and over Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import CAPITAL, KEY, MODEL, NO_SUCH_MODEL, QUESTION, URL, check, main, raised
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

FEW = ModelSettings(max_tokens=80)
openai_provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
over_chat = OpenAIChatModel(MODEL, provider=openai_provider)
over_responses = OpenAIResponsesModel(MODEL, provider=openai_provider)


def over_anthropic() -> Model:
    return AnthropicModel(MODEL, provider=AnthropicProvider(api_key=KEY, base_url=URL))


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


def talk(model: Model) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=FEW)
    result = agent.run_sync(CAPITAL)
    assert result.output
    assert result.usage.output_tokens > 0

    async def stream() -> tuple[list[str], str]:
        async with agent.run_stream(CAPITAL) as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
            return pieces, await streamed.get_output()

    pieces, output = asyncio.run(stream())
    assert len(pieces) > 1
    assert "".join(pieces) == output


def structured(model: Model) -> None:
    """The answer is the call of an output tool, which must be called."""
    assert isinstance(Agent(model, output_type=Weather, model_settings=FEW).run_sync(QUESTION).output, Weather)


@check
def chat() -> None:
    talk(over_chat)


@check
def chat_output_tool() -> None:
    structured(over_chat)


@check
def chat_native_output() -> None:
    agent = Agent(over_chat, output_type=NativeOutput(Weather), model_settings=FEW)
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


@check
def errors() -> None:
    agent = Agent(OpenAIChatModel(NO_SUCH_MODEL, provider=openai_provider))
    assert raised(ModelHTTPError, lambda: agent.run_sync(CAPITAL)).status_code == 404


@check
def responses() -> None:
    talk(over_responses)


@check
def responses_output_tool() -> None:
    structured(over_responses)


@check
def anthropic_messages() -> None:
    talk(over_anthropic())


@check
def anthropic_output_tool() -> None:
    structured(over_anthropic())


main()
