"""The embedded model on every backend, over HTTP, through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo
from openai.types.chat import ChatCompletionMessageParam

from sglang_jax.config import Backend
from sglang_jax.engine.model_core import load_core, load_text_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module", params=[Backend.JAX, Backend.TORCH])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture(scope="module")
def demo(backend: Backend) -> Iterator[EchoServer]:
    options = {"dtype": "float32", "context_length": 256, "max_total_tokens": 1024, "max_running_requests": 2}
    options |= {"backend": backend, "device": "cpu", "skip_warmup": True}
    with serve_echo(load_core, load_text_tokenizer, model_path="demo", **options) as server:
        server.http.timeout = 300  # the first test waits for the compilation of programs
        yield server


@pytest.fixture(scope="module")
def client(demo: EchoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_server_info_names_the_backend(backend: Backend, demo: EchoServer) -> None:
    assert demo.http.get("/server_info").json()["internal_states"][0]["backend"] == backend.value


def test_chat_whole_and_as_a_stream(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_an_answer_follows_a_json_schema(client: openai.OpenAI) -> None:
    """Its first step samples under a mask, and so does each after it."""
    country = {"type": "string", "enum": ["France", "Spain"]}
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "country": country},
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    asked: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=60, response_format=asked
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert "Paris" in value["capital"]
    assert value["country"] == "France"


def test_logprobs_are_greedy_and_add_up_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=20, logprobs=True, top_logprobs=5
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == ANSWER + "<|im_end|>"
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_a_prompt_seen_before_is_cached(client: openai.OpenAI) -> None:
    prompt = "Once upon a time, in a village far away, there lived an old baker who made the best bread. " * 2
    for seen in (False, True):
        answer = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is seen


def test_echoed_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    prompt = "Zürich costs 5 € a day,"
    answer = client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=3, echo=True, logprobs=1
    ).choices[0]
    assert answer.text.startswith(prompt)
    assert answer.logprobs is not None
    tokens, offsets = answer.logprobs.tokens or [], answer.logprobs.text_offset or []
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert answer.text[offset:].startswith(token)


def test_tokenize_uses_the_models_vocabulary(client: openai.OpenAI, demo: EchoServer) -> None:
    with pytest.raises(openai.BadRequestError, match="49152") as refused:
        client.completions.create(model="demo", prompt=[49152])
    assert refused.value.param == "prompt"
    tokens = demo.http.post("/tokenize", json={"prompt": "héllo 你好"}).json()["tokens"]
    assert demo.http.post("/detokenize", json={"tokens": tokens}).json()["text"] == "héllo 你好"


def test_turns_of_a_session_equal_whole_prompts(demo: EchoServer) -> None:
    """All but less than a page of each turn's prefix is cached, and no state is left after the session is closed."""
    session = demo.http.post("/open_session", json={"capacity_of_str_len": 0, "streaming": True}).json()
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    history: list[int] = []
    for text in ("The capital of France is", " Its largest museum is", " A painting there is", " It was painted by"):
        new = demo.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        turn = {"text": text, "session_params": {"id": session}, "sampling_params": sampling}
        answer = demo.http.post("/generate", json=turn).json()
        whole = {"input_ids": [*history, *new], "sampling_params": sampling, "extra_key": "apart"}
        assert answer["output_ids"] == demo.http.post("/generate", json=whole).json()["output_ids"]
        assert answer["meta_info"]["prompt_tokens"] == len(history) + len(new)
        assert answer["meta_info"]["cached_tokens"] > len(history) - 1 - 16
        history += [*new, *answer["output_ids"]]
    assert demo.http.post("/close_session", json={"session_id": session}).status_code == 200
    (state,) = demo.http.get("/server_info").json()["internal_states"]
    assert (state["num_sessions"], state["num_session_tokens"], state["num_memory_faults"]) == (0, 0, 0)
