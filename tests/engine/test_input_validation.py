from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.engine_fakes import CONTEXT_LENGTH, EOS, MODEL_INFO, VOCAB_SIZE

from sglang_jax.engine import validation
from sglang_jax.engine.types import GenerateInput
from sglang_jax.errors import ParameterError, PromptTooLongError
from sglang_jax.sampling.params import MAX_STOP_TOKEN_IDS, SEED_LIMIT, SamplingParams


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE} at position 1, ids go from 0 to {VOCAB_SIZE - 1}"),
        ([-1], "token id -1 at position 0"),
        ([2**70], f"token id {2**70}"),
        ([1.5], "flat list of integers"),
        (["a"], "flat list of integers"),
        ([True, False], "flat list of integers"),
        ([None], "flat list of integers"),
        ([[1], [2]], "flat list of integers"),
        ([[1], [2, 3]], "flat list"),
        (7, "must be text or a list of token ids, got int"),
        (b"abc", "got bytes"),
        ({1: 2}, "got dict"),
    ],
)
def test_refused_token_ids(prompt: object, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        validation.prompt_array(prompt, VOCAB_SIZE)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), np.array([5, 6]), np.array([5, 6], np.int16), range(5, 7)])
def test_accepted_token_ids(prompt: object) -> None:
    ids = validation.prompt_array(prompt, VOCAB_SIZE)  # type: ignore[arg-type]
    assert ids.tobytes() == b"\5\0\0\0\6\0\0\0"


@pytest.mark.parametrize(
    ("request_fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": "a\ud800"}, "prompt", "character 1 is a lone surrogate"),
        ({"extra_key": "\udc00"}, "extra_key", "lone surrogate"),
        ({"top_logprobs_num": 21}, "top_logprobs_num", r"\[0, 20\], got 21"),
        ({"top_logprobs_num": -1}, "top_logprobs_num", r"\[0, 20\], got -1"),
        ({"sampling": SamplingParams(logit_bias={VOCAB_SIZE: 1.0})}, "logit_bias", f"ends at {VOCAB_SIZE - 1}"),
        ({"sampling": SamplingParams(stop_token_ids=[VOCAB_SIZE])}, "stop_token_ids", "vocabulary"),
        ({"sampling": SamplingParams(stop_token_ids=range(16))}, "stop_token_ids", "at most 16 .* got 17"),
    ],
)
def test_refused_input(request_fields: dict[str, object], param: str, words: str) -> None:
    request = dataclasses.replace(GenerateInput(prompt="a"), **request_fields)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=words) as caught:
        validation.check_input(request, MODEL_INFO)
    assert caught.value.param == param


def test_as_many_stop_tokens_as_fit() -> None:
    known = SamplingParams(stop_token_ids=[EOS, *range(MAX_STOP_TOKEN_IDS - 1)])
    ignoring = SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS), ignore_eos=True)
    for sampling in (known, ignoring):
        validation.check_input(GenerateInput(prompt="a", sampling=sampling), MODEL_INFO)
        assert len(validation.stop_token_ids(sampling, MODEL_INFO)) == MAX_STOP_TOKEN_IDS


def test_prompt_too_long_names_length_and_limit() -> None:
    validation.check_length(GenerateInput(prompt="a"), CONTEXT_LENGTH - 1, CONTEXT_LENGTH)
    with pytest.raises(
        PromptTooLongError, match=f"{CONTEXT_LENGTH} tokens; the limit is {CONTEXT_LENGTH - 1}"
    ) as caught:
        validation.check_length(GenerateInput(prompt="a"), CONTEXT_LENGTH, CONTEXT_LENGTH)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_logprob_start_must_be_in_the_prompt() -> None:
    def check(start: int) -> None:
        request = GenerateInput(prompt="a", return_logprob=True, logprob_start_len=start)
        validation.check_length(request, 4, CONTEXT_LENGTH)

    for start in (-1, 0, 3):
        check(start)
    for start in (-2, 4):
        with pytest.raises(ParameterError, match=rf"\[-1, 3\] for a prompt of 4 tokens, got {start}"):
            check(start)


def test_lengths_are_clamped_to_the_room() -> None:
    assert [p.max_new_tokens for p in validation.expand(SamplingParams(max_new_tokens=None), 10)] == [10]
    assert [p.max_new_tokens for p in validation.expand(SamplingParams(max_new_tokens=11), 10)] == [10]
    assert [p.max_new_tokens for p in validation.expand(SamplingParams(max_new_tokens=9), 10)] == [9]
    with pytest.raises(ParameterError, match=r"min_new_tokens .* \[0, 10\], got 11"):
        validation.expand(SamplingParams(max_new_tokens=None, min_new_tokens=11), 10)


def test_n_completions_count_the_seed_up() -> None:
    assert [p.seed for p in validation.expand(SamplingParams(n=3, seed=7), 10)] == [7, 8, 9]
    assert [p.seed for p in validation.expand(SamplingParams(n=2), 10)] == [None, None]
    last = SEED_LIMIT - 1
    assert [p.seed for p in validation.expand(SamplingParams(n=2, seed=last), 10)] == [last, -SEED_LIMIT]
    assert all(p.n == 1 for p in validation.expand(SamplingParams(n=3, seed=7), 10))
