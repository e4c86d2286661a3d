"""LangChain's chat models for OpenAI's chats and responses, and for Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import openai
from checks import CAPITAL, KEY, MODEL, QUESTION, URL, check, is_weather, main, raised
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


@tool(args_schema=Weather)
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{days} sunny days in {city}"


def over_openai(**fields: Any) -> ChatOpenAI:
    given = {"model": MODEL, "temperature": 0, "max_tokens": 80, "max_retries": 0, **fields}
    return ChatOpenAI(**{"base_url": f"{URL}/v1", "api_key": KEY, **given})


def over_anthropic(**fields: Any) -> ChatAnthropic:
    return ChatAnthropic(
        **{"model_name": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": 80, "max_retries": 0, **fields}
    )


def talk(model: BaseChatModel) -> None:
    answer = model.invoke(CAPITAL)
    assert answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    whole: BaseMessageChunk | None = None
    pieces = []
    for chunk in model.stream(CAPITAL):
        pieces.append(chunk.text)
        whole = chunk if whole is None else whole + chunk
    assert len([piece for piece in pieces if piece]) > 1
    assert whole is not None
    assert "".join(pieces) == whole.text


def call_tool(model: BaseChatModel, no_tool: Any = "none") -> None:
    question = HumanMessage(QUESTION)
    answer = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke([question])
    [call] = answer.tool_calls
    is_weather(call["args"])
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([get_weather], tool_choice=no_tool).invoke([question, answer, result]).text


@check
def chat() -> None:
    talk(over_openai())


@check
def chat_tools() -> None:
    call_tool(over_openai())


@check
def chat_structured() -> None:
    assert isinstance(over_openai().with_structured_output(Weather).invoke(QUESTION), Weather)


@check
def errors() -> None:
    error = raised(openai.BadRequestError, lambda: over_openai(temperature=-1).invoke(CAPITAL))
    assert error.param == "temperature"


@check
def responses() -> None:
    talk(over_openai(use_responses_api=True))


@check
def responses_tools() -> None:
    call_tool(over_openai(use_responses_api=True))


@check
def responses_structured() -> None:
    assert isinstance(over_openai(use_responses_api=True).with_structured_output(Weather).invoke(QUESTION), Weather)


@check
def anthropic_messages() -> None:
    talk(over_anthropic())


@check
def anthropic_tools() -> None:
    call_tool(over_anthropic(), no_tool={"type": "none"})


@check
def anthropic_errors() -> None:
    raised(anthropic.BadRequestError, lambda: over_anthropic(max_tokens=-1).invoke(CAPITAL))


main()
