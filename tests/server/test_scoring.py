"""Prompts that are scored and not continued: no output tokens, only the prompt's logprobs. `server` echoes; the last
test runs the whole engine."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import CACHED_TOKENS, CONTEXT_LENGTH, FAKE_VOCAB_SIZE, load_fake_model

from sglang_jax.runner.fake_model import Oracle

NO_TOKENS = {"max_new_tokens": 0}
SCORE = {"sampling_params": NO_TOKENS, "return_logprob": True, "logprob_start_len": 0}


def post(server: EchoServer, path: str, body: dict[str, Any]) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(server: EchoServer, **body: Any) -> Any:
    return post(server, "/generate", body)


def complete(server: EchoServer, **body: Any) -> Any:
    return post(server, "/v1/completions", body)


def without_time(answer: dict[str, Any]) -> dict[str, Any]:
    meta = {
        name: value
        for name, value in answer["meta_info"].items()
        if name not in ("e2e_latency", "id", "queue_time", "sampled_ago")
    }
    return {**answer, "meta_info": meta}


SCORED = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "cached_tokens": CACHED_TOKENS,
        "weight_version": "default",
        "input_token_logprobs": [[-6.5, 65, None], [-6.6, 66, None], [-6.7, 67, None]],
        "output_token_logprobs": [],
    },
}


@pytest.mark.parametrize("incremental", [False, True])
def test_generate_reports_only_the_prompt(server: EchoServer, incremental: bool) -> None:
    assert without_time(generate(server, text="ABC", **SCORE)) == SCORED
    [event] = server.events("/generate", {"text": "ABC", "incremental_output": incremental, **SCORE})
    assert without_time(event) == SCORED
    assert server.seen()[-1]["max_new_tokens"] == 0


def test_top_logprobs_and_a_later_start(server: EchoServer) -> None:
    meta = generate(server, text="ABC", **{**SCORE, "logprob_start_len": 2}, top_logprobs_num=2)["meta_info"]
    assert meta["input_token_logprobs"] == [[-6.7, 67, None]]
    assert meta["input_top_logprobs"] == [[[-6.7, 67, None], [-6.8, 68, None]]]
    assert meta["output_top_logprobs"] == []


def test_a_prompt_may_be_computed_only_for_the_cache(server: EchoServer) -> None:
    """SGLang's frontend does so with the shared prefix of several prompts."""
    answer = generate(server, text="ABC", sampling_params=NO_TOKENS)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert "input_token_logprobs" not in answer["meta_info"]


def test_several_prompts_and_completions(server: EchoServer) -> None:
    sampling = [{"max_new_tokens": 0, "n": 2}, {"max_new_tokens": 0, "n": 1, "stop": ["x"]}]
    answers = generate(server, text=["ABC", "AB"], **{**SCORE, "sampling_params": sampling})
    assert [without_time(answer) for answer in answers[:2]] == [SCORED, SCORED]
    assert len(answers[2]["meta_info"]["input_token_logprobs"]) == 2
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [0, 0, 0]


def test_scored_and_continued_prompts_in_one_batch(server: EchoServer) -> None:
    answers = generate(server, text=["AB", "AB"], sampling_params=[NO_TOKENS, {"max_new_tokens": 1}])
    assert [answer["text"] for answer in answers] == ["", "A"]


ECHO = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
"""Older versions of lm-eval-harness send this with a list of token ids."""


def test_completions_echo_the_prompt_and_its_logprobs(server: EchoServer) -> None:
    answer = complete(server, prompt=[list(b"AB"), list("€".encode())], **ECHO)
    first, second = answer["choices"]
    assert first == {
        "index": 0,
        "text": "AB",
        "logprobs": {
            "tokens": ["A", "B"],
            "token_logprobs": [-6.5, -6.6],
            "top_logprobs": [{"A": -6.5}, {"B": -6.6}],
            "text_offset": [0, 1],
        },
        "finish_reason": "length",
        "matched_stop": None,
    }
    assert (second["text"], len(second["logprobs"]["tokens"])) == ("€", 3)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)


def test_completions_without_an_echo_are_empty(server: EchoServer) -> None:
    [choice] = complete(server, prompt="AB", max_tokens=0, logprobs=1)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_scored_completions_has_one_event_each(server: EchoServer, echo: bool) -> None:
    body = {**ECHO, "prompt": ["AB", "C"], "echo": echo, "n": 2}
    whole = complete(server, **body)["choices"]
    *events, last = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    told = sorted((choice for event in events for choice in event["choices"]), key=lambda choice: choice["index"])
    assert told == whole
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 0)


def test_min_tokens_must_be_zero_too(server: EchoServer) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0, "min_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "min_tokens must be an integer in [0, 0], got 1"


def test_a_prompt_may_fill_the_context(server: EchoServer) -> None:
    answer = generate(server, text="a" * CONTEXT_LENGTH, **SCORE)
    assert len(answer["meta_info"]["input_token_logprobs"]) == CONTEXT_LENGTH
    response = server.http.post("/generate", json={"text": "a" * (CONTEXT_LENGTH + 1), **SCORE})
    assert f"{CONTEXT_LENGTH + 1} tokens; the limit is {CONTEXT_LENGTH}," in response.json()["error"]["message"]


def test_scored_prompts_have_only_an_end_to_end_latency(server: EchoServer) -> None:
    def counts() -> dict[str, float]:
        lines = [line for line in server.http.get("/metrics").text.splitlines() if "_seconds_count" in line]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = counts()
    server.events("/generate", {"text": "AB", **SCORE})
    new = {name: count - before[name] for name, count in counts().items()}
    assert new == {
        "sglang:queue_time_seconds_count": 1,
        "sglang:time_to_first_token_seconds_count": 0,
        "sglang:inter_token_latency_seconds_count": 0,
        "sglang:e2e_request_latency_seconds_count": 1,
    }


def test_scores_of_the_whole_engine() -> None:
    """Both routes, over the scheduler and a runner that hashes each row's context."""
    prompt = [*range(3, 90)]
    expected = [None, *Oracle(FAKE_VOCAB_SIZE).prompt_logprobs(prompt)]
    with serve_echo(load_fake_model, page_size=4, max_total_tokens=256, chunked_prefill_size=16) as server:
        for _ in range(2):  # the second time, some of it is cached
            meta = generate(server, input_ids=prompt, **SCORE)["meta_info"]
            assert [logprob for logprob, _, _ in meta["input_token_logprobs"]] == expected
            assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
            assert meta["finish_reason"] == {"type": "length", "length": 0}
            [choice] = complete(server, prompt=[prompt], **ECHO)["choices"]
            assert choice["logprobs"]["token_logprobs"] == expected
            assert choice["finish_reason"] == "length"
