"""OpenAI's Python client against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import CACHED_TOKENS, CONTEXT_LENGTH, EOS
from openai.types.chat import ChatCompletionMessageParam

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
RENDERED = "user: hi\n"
BREAKS_THE_CORE = EOS + 1


@pytest.fixture(scope="module")
def client(server: EchoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("echo-model", "model")
    assert client.models.retrieve("echo-model").id == "echo-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo-model", messages=HI)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "echo-model")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", RENDERED)
    assert choice.logprobs is None
    assert answer.to_dict()["metadata"] == {"weight_version": "default"}
    assert answer.usage is not None
    usage = answer.usage.model_dump(exclude_none=True)
    tokens = len(RENDERED)
    assert usage == {
        "prompt_tokens": tokens,
        "completion_tokens": tokens + 1,
        "total_tokens": 2 * tokens + 1,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


def test_chat_without_a_limit_may_use_the_context(client: openai.OpenAI, server: EchoServer) -> None:
    client.chat.completions.create(model="default", messages=HI)
    assert server.seen()[-1]["max_new_tokens"] == CONTEXT_LENGTH - len(RENDERED)
    client.chat.completions.create(model="default", messages=HI, max_completion_tokens=4)
    assert server.seen()[-1]["max_new_tokens"] == 4
    client.chat.completions.create(model="default", messages=HI, max_tokens=5)
    assert server.seen()[-1]["max_new_tokens"] == 5


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="echo-model", messages=HI, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == RENDERED
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo-model", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(RENDERED) + 1
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS
    assert all(chunk.choices for chunk in chunks[:-1])


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo-model", messages=HI, logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    [first, second] = logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("u", -ord("u") / 10, [ord("u")])
    assert [(top.token, top.bytes) for top in first.top_logprobs] == [("u", [ord("u")]), ("v", [ord("v")])]
    assert second.token == "s"


def test_chat_stream_logprobs_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    at_once = client.chat.completions.create(model="echo-model", messages=HI, logprobs=True, top_logprobs=1)
    streamed = client.chat.completions.create(
        model="echo-model", messages=HI, logprobs=True, top_logprobs=1, stream=True
    )
    entries = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert at_once.choices[0].logprobs is not None
    assert entries == at_once.choices[0].logprobs.content


def test_several_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo-model", messages=HI, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)
    assert answer.usage.completion_tokens == 3 * (len(RENDERED) + 1)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="echo-model", messages=HI, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {RENDERED}


def test_content_parts_and_roles(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo-model",
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    assert answer.choices[0].message.content == "system: be brief\nuser: a\nb\n"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="echo-model", prompt="Hello", max_tokens=3, seed=9, logit_bias={"65": 1})
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hel", "length")
    assert answer.choices[0].logprobs is None


def test_completion_stream_and_stop(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="echo-model", prompt="one, two", stop=[","], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="echo-model", prompt=["ab", "cd"], stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 6)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["ab", "cd"]


def test_a_response_id_may_be_chosen(client: openai.OpenAI) -> None:
    assert client.completions.create(model="default", prompt="a", extra_body={"rid": "mine"}).id == "mine"


def test_errors_raise_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 100\], got -1") as bad:
        client.chat.completions.create(model="echo-model", messages=HI, temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here") as missing:
        client.chat.completions.create(model="gpt", messages=HI)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_an_error_after_the_start_of_a_stream_is_an_event() -> None:
    with (
        serve_echo(model_path="echo:0.02") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="default", prompt="a" * 200, max_tokens=200, stream=True)
        assert next(iter(stream)).choices[0].text == "a"
        broken = server.http.post("/generate", json={"input_ids": [BREAKS_THE_CORE]})
        assert (broken.status_code, broken.json()["error"]["code"]) == (500, "engine_dead")
        with pytest.raises(openai.APIError, match="the echo broke"):
            list(stream)


def test_api_key() -> None:
    with serve_echo(api_key="sesame") as server:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            client.models.list()
        assert refused.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
            assert client.completions.create(model="default", prompt="a").choices[0].text == "a"
        assert server.http.get("/health").status_code == 200
        for path in ("/metrics", "/health_generate", "/v1/models", "/server_info", "/openapi.json", "/nowhere"):
            assert server.http.get(path).status_code == 401
            assert server.http.get(path, headers={"Authorization": "Basic sesame"}).status_code == 401
        answer = server.http.get("/server_info", headers={"Authorization": "bearer sesame"})
        assert answer.status_code == 200
        assert "sesame" not in answer.text
