"""Instructor: answers as Pydantic models, by tools and by schemas."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from checks import KEY, MODEL, QUESTION, URL, check, main
from pydantic import BaseModel, ConfigDict, Field

CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # otherwise a small model adds properties without end

    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, response_model=Weather, max_tokens=80, max_retries=0
    )
    assert isinstance(answer, Weather)


@check
def tools() -> None:
    ask(instructor.Mode.TOOLS)


@check
def tools_strict() -> None:
    ask(instructor.Mode.TOOLS_STRICT)


@check
def json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


@check
def partial_stream() -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(
        client.chat.completions.create_partial(model=MODEL, messages=CHAT, response_model=Weather, max_tokens=80)
    )
    assert len(parts) > 1
    assert Weather.model_validate(parts[-1].model_dump())


main()
