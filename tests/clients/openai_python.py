"""OpenAI's Python client: chat, completions, models, responses, files and batches."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any, Literal

import openai
from checks import CAPITAL, KEY, MODEL, NO_SUCH_MODEL, QUESTION, URL, WEATHER, check, is_weather, main, raised
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
CHAT: list[Any] = [{"role": "user", "content": CAPITAL}]
FUNCTION = {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", **FUNCTION}
BATCH_SECONDS = 120


class Weather(BaseModel):
    city: Literal["Oslo", "Paris", "Rome"]
    days: int = Field(ge=1, le=5)


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).object == "model"


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def chat_stream() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=24, temperature=0, seed=1)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=24,
        temperature=0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@check
def chat_async() -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as several:
            answers = await asyncio.gather(
                *(several.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4) for _ in range(4))
            )
        return [answer.choices[0].message.content for answer in answers]

    assert all(asyncio.run(ask()))


@check
def chat_logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content or []] == [3] * 4


@check
def tools() -> None:
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model=MODEL, messages=question, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    is_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 sunny days"}
    talk = [*question, choice.message, result]
    final = client.chat.completions.create(model=MODEL, messages=talk, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert final.choices[0].message.content


@check
def tools_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = final.choices[0].message.tool_calls or []
    is_weather(call.function.arguments)


@check
def structured_parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=Weather, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


@check
def completions() -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=4, logprobs=2, echo=True, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith("One, two,")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(isinstance(value, float) for value in choice.logprobs.token_logprobs[1:])


REFUSED: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
    (openai.NotFoundError, {"model": NO_SUCH_MODEL}),
    (openai.BadRequestError, {"temperature": -1}),
    (openai.BadRequestError, {"stream": True, "top_p": 7}),
]


@check
def errors() -> None:
    for kind, fields in REFUSED:
        asked = {"model": MODEL, "messages": CHAT, **fields}
        error = raised(kind, lambda asked=asked: client.chat.completions.create(**asked))
        assert error.code, error
        assert error.message, error
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    assert raised(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"


@check
def responses() -> None:
    answer = client.responses.create(
        model=MODEL, instructions="Be brief.", input=CAPITAL, max_output_tokens=24, temperature=0, store=False
    )
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@check
def responses_stream() -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "input": CAPITAL, "max_output_tokens": 24, "temperature": 0, "store": False
    }  # fmt: skip
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.usage is not None


@check
def responses_tools() -> None:
    question: Any = {"role": "user", "content": QUESTION}
    answer = client.responses.create(
        model=MODEL,
        input=[question],
        tools=[FLAT_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=80,
        store=False,
    )
    [call] = [item for item in answer.output if item.type == "function_call"]
    is_weather(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3 sunny days"}
    final = client.responses.create(
        model=MODEL,
        input=[question, *answer.output, result],  # type: ignore[list-item]
        tools=[FLAT_TOOL],
        tool_choice="none",
        max_output_tokens=16,
        store=False,
    )
    assert final.output_text


@check
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=60, store=False)
    assert isinstance(answer.output_parsed, Weather)


@check
def responses_errors() -> None:
    for kind, fields in REFUSED:
        asked = {"model": MODEL, "input": CAPITAL, "store": False, **fields}
        error = raised(kind, lambda asked=asked: client.responses.create(**asked))
        assert error.code, error


def upload(count: int) -> str:
    """The id of an uploaded file with this many chats."""
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": CHAT, "max_tokens": 4},
        }
        for number in range(count)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("questions.jsonl", io.BytesIO(text)), purpose="batch").id


@check
def files() -> None:
    uploaded = upload(2)
    found = client.files.retrieve(uploaded)
    assert (found.filename, found.purpose) == ("questions.jsonl", "batch")
    assert uploaded in [file.id for file in client.files.list(purpose="batch")]
    assert len(client.files.content(uploaded).content) == found.bytes
    assert client.files.delete(uploaded).deleted
    assert raised(openai.NotFoundError, lambda: client.files.retrieve(uploaded)).code


@check
def batches() -> None:
    batch = client.batches.create(
        input_file_id=upload(3), endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a check"}
    )
    until = time.monotonic() + BATCH_SECONDS
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < until, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.metadata == {"of": "a check"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (3, 3)
    assert batch.output_file_id is not None
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["line-0", "line-1", "line-2"]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    assert all(answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers)
    assert batch.id in [each.id for each in client.batches.list()]


@check
def batches_cancel() -> None:
    batch = client.batches.create(input_file_id=upload(200), endpoint="/v1/chat/completions", completion_window="24h")
    batch = client.batches.cancel(batch.id)
    until = time.monotonic() + BATCH_SECONDS
    while batch.status == "cancelling":
        assert time.monotonic() < until, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "cancelled", batch


main()
