"""LlamaIndex's `OpenAILike`."""

from __future__ import annotations

from typing import Literal

from checks import CAPITAL, KEY, MODEL, QUESTION, URL, check, is_weather, main
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_tokens=80,
    temperature=0,
    max_retries=0,
)
CHAT = [ChatMessage(role="user", content=CAPITAL)]


@check
def chat() -> None:
    assert llm.chat(CHAT).message.content


@check
def chat_stream() -> None:
    responses = list(llm.stream_chat(CHAT))
    assert len(responses) > 1
    assert "".join(response.delta or "" for response in responses) == responses[-1].message.content


@check
def completions() -> None:
    plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=False, max_tokens=8, max_retries=0)
    assert plain.complete("One, two,").text


@check
def tools() -> None:
    weather = FunctionTool.from_defaults(
        lambda city, days: f"{days} sunny days in {city}", name="get_weather", fn_schema=Weather
    )
    answer = llm.chat_with_tools([weather], QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = llm.get_tool_calls_from_response(answer)
    is_weather(call.tool_kwargs)


@check
def structured() -> None:
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Weather, prompt_template_str=QUESTION, llm=llm, verbose=False
    )
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": Weather.model_json_schema()}}
    assert isinstance(program(llm_kwargs={"response_format": schema}), Weather)


main()
