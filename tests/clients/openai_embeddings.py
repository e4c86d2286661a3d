"""OpenAI's Python client: vectors."""

from __future__ import annotations

import asyncio
import base64
import struct

import openai
from checks import KEY, MODEL, NO_SUCH_MODEL, URL, check, cosine, main, raised

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
TEXTS = ["The cat sleeps on the warm sofa.", "A kitten naps on a couch.", "Quarterly revenue fell by 3 %."]
SIZE = 576
"""Numbers of a vector of the embedded model."""


def vectors(**fields: object) -> list[list[float]]:
    answer = client.embeddings.create(**{"model": MODEL, "input": TEXTS, **fields})  # type: ignore[arg-type]
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    return [each.embedding for each in answer.data]


@check
def floats() -> None:
    found = vectors(encoding_format="float")
    assert [len(each) for each in found] == [SIZE] * len(TEXTS)
    assert all(abs(sum(number * number for number in each) - 1) < 1e-5 for each in found)
    assert cosine(found[0], found[1]) > cosine(found[0], found[2])


@check
def base64_by_default() -> None:
    """The package asks for base64 and turns it into numbers."""
    answer = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS)
    assert b'"encoding_format":"base64"' in answer.http_request.content
    for ours, theirs in zip(vectors(), vectors(encoding_format="float"), strict=True):
        assert cosine(ours, theirs) > 0.99999


@check
def base64_asked_for() -> None:
    [text, *_] = vectors(encoding_format="base64")
    assert isinstance(text, str)
    numbers = struct.unpack(f"<{SIZE}f", base64.b64decode(text))
    assert cosine(numbers, vectors(encoding_format="float")[0]) > 0.99999


@check
def dimensions() -> None:
    whole, cut = vectors(), vectors(dimensions=64)
    assert [len(each) for each in cut] == [64] * len(TEXTS)
    assert all(abs(sum(number * number for number in each) - 1) < 1e-5 for each in cut)
    assert all(cosine(few, many[:64]) > 0.9999 for few, many in zip(cut, whole, strict=True))


@check
def inputs() -> None:
    [one] = vectors(input=TEXTS[0])
    assert cosine(one, vectors()[0]) > 0.9999
    assert [len(each) for each in vectors(input=[[504, 1165], [504]])] == [SIZE, SIZE]
    assert len(vectors(input=[504, 1165])) == 1


@check
def several_at_once() -> None:
    async def ask() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as several:
            answers = await asyncio.gather(
                *(several.embeddings.create(model=MODEL, input=TEXTS[:count]) for count in (1, 2, 3))
            )
        return [len(answer.data) for answer in answers]

    assert asyncio.run(ask()) == [1, 2, 3]


@check
def errors() -> None:
    def create(**fields: object) -> object:
        return client.embeddings.create(**{"model": MODEL, "input": "a text", **fields})  # type: ignore[arg-type]

    assert raised(openai.BadRequestError, lambda: create(dimensions=SIZE + 1)).param == "dimensions"
    assert raised(openai.BadRequestError, lambda: create(input=[])).message
    assert raised(openai.NotFoundError, lambda: create(model=NO_SUCH_MODEL)).code
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    error = raised(openai.BadRequestError, lambda: client.chat.completions.create(**chat))  # type: ignore[call-overload]
    assert "vectors" in error.message, error
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    raised(openai.AuthenticationError, lambda: stranger.embeddings.create(model=MODEL, input="a text"))


main()
