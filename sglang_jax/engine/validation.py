"""Checks a client's input, and converts it to the scheduler's requests."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine.types import GenerateInput, ModelInfo, SessionTurnInput, TextTokenizer
from sglang_jax.errors import ParameterError, PromptTooLongError, quote
from sglang_jax.sampling.params import MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SEED_LIMIT, SamplingParams
from sglang_jax.sampling.wants import check_wants
from sglang_jax.scheduler.commands import OpenSession

MAX_PROMPT_LOGPROBS = 2**20
"""Maximum logprobs of prompts in one answer, with alternatives, for n completions: up to about a hundred bytes each."""

MAX_REPEATED_CHARACTERS = 2**23
"""Maximum characters that an answer repeats from its request: prompts for each of n completions, texts of token ids.
One token id may stand for more than a hundred characters."""


def check_input(request: GenerateInput, info: ModelInfo) -> None:
    """Checks a request before its prompt is tokenized. Raises `ParameterError` naming the field."""
    check_wants(request.wants, pools=info.pooler is not None)
    if isinstance(request.prompt, str):
        if not request.prompt:
            raise ParameterError("prompt is empty, at least one token is needed", param="prompt")
        _check_text("prompt", request.prompt)
    if request.extra_key is not None:
        _check_text("extra_key", request.extra_key)
    if request.session is not None:
        _check_turn(request, request.session)
    if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise ParameterError(
            f"top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {request.top_logprobs_num}",
            param="top_logprobs_num",
        )
    request.sampling.check_vocabulary(info.vocab_size)
    num_stop_ids = len(stop_token_ids(request.sampling, info))
    if num_stop_ids > MAX_STOP_TOKEN_IDS:
        raise ParameterError(
            f"at most {MAX_STOP_TOKEN_IDS} token ids may end a request, got {num_stop_ids}: stop_token_ids and the "
            f"model's {len(info.eos_token_ids)} end-of-sequence ids",
            param="stop_token_ids",
        )


def new_session(
    session_id: str | None, owner: str = "", *, streaming: bool = True, timeout: float | None = None
) -> OpenSession:
    """Checks the options of a session. `session_id`: None to get one. Raises `ParameterError` naming the field."""
    if session_id is not None:
        if not isinstance(session_id, str) or not session_id:
            raise ParameterError(
                f"session_id must be a non-empty text, got {quote(session_id)}; leave it out to get one",
                param="session_id",
            )
        _check_text("session_id", session_id)
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0.0 < timeout <= sys.float_info.max):
        raise ParameterError(f"timeout must be a positive number of seconds, got {quote(timeout)}", param="timeout")
    return OpenSession(session_id or "", owner, streaming, timeout)


def _check_turn(request: GenerateInput, turn: SessionTurnInput) -> None:
    _check_text("session_params.id", turn.session_id)
    if request.sampling.n != 1:
        raise ParameterError(
            f"n must be 1 for a turn of a session ({quote(turn.session_id)}), which continues from one output; got "
            f"{request.sampling.n}",
            param="n",
        )


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{name} is not valid text: character {error.start} is a lone surrogate ({text[error.start]!r})", param=name
        ) from error


def stop_token_ids(sampling: SamplingParams, info: ModelInfo) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else info.eos_token_ids)


def prompt_array(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Checks a prompt's token ids and returns them as an array `[tokens]`. Raises `ParameterError`."""
    if isinstance(token_ids, (bytes, bytearray)) or not isinstance(token_ids, (Sequence, np.ndarray)):
        raise ParameterError(
            f"prompt must be text or a list of token ids, got {type(token_ids).__name__}", param="prompt"
        )
    if len(token_ids) == 0:
        raise ParameterError("prompt is empty, at least one token is needed", param="prompt")
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:  # nested lists of different lengths
        raise ParameterError("prompt must be a flat list of token ids", param="prompt") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iuO":
        raise ParameterError(f"prompt must be a flat list of integers, got {quote(token_ids[0])} in it", param="prompt")
    if ids.dtype.kind == "O" and not all(isinstance(token, int) for token in token_ids):
        raise ParameterError("prompt must be a flat list of integers, got something else in it", param="prompt")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        position = int(np.argmax(outside))
        raise ParameterError(
            f"prompt holds token id {quote(int(ids[position]))} at position {position}, "
            f"ids go from 0 to {vocab_size - 1}",
            param="prompt",
        )
    return ids.astype("<i4")


def check_characters(count: int, tokenizer: TextTokenizer, context_length: int, param: str = "prompt") -> None:
    """Raises `PromptTooLongError`, before tokenizing, if a text of `count` characters cannot fit the context."""
    limit = context_length * tokenizer.longest_token
    if count > limit:
        raise PromptTooLongError(
            f"{param} has {count} characters; the limit is {limit}, because the context has {context_length} tokens "
            f"(--context-length) and the longest token has {tokenizer.longest_token} characters",
            param=param,
        )


def check_repeated(
    texts: Sequence[tuple[str | Sequence[int] | NDArray[np.int32], int]], tokenizer: TextTokenizer, param: str
) -> None:
    """Raises `ParameterError` if an answer would repeat too many characters. `texts`: texts or token ids, each with the
    number of repetitions. May take a tenth of a second for many ids."""
    longest = tokenizer.longest_token
    if (
        sum(times * len(text) * (1 if isinstance(text, str) else longest) for text, times in texts)
        <= MAX_REPEATED_CHARACTERS
    ):
        return
    count = sum(times * (len(text) if isinstance(text, str) else _characters(text, tokenizer)) for text, times in texts)
    if count > MAX_REPEATED_CHARACTERS:
        raise ParameterError(
            f"{param} would repeat {count} characters of the request in n completions; the limit of "
            f"one response is {MAX_REPEATED_CHARACTERS}",
            param=param,
        )


def _characters(ids: Sequence[int] | NDArray[np.int32], tokenizer: TextTokenizer) -> int:
    """Maximum characters of these tokens. Invalid ids count as none: another check refuses them."""
    return sum(count * len(tokenizer.token_bytes(token)) for token, count in Counter(ids).items() if 0 <= token < 2**31)


def check_length(request: GenerateInput, prompt_tokens: int, context_length: int) -> None:
    """Raises `PromptTooLongError` if the prompt, plus one output token unless none is requested, does not fit the
    context, and `ParameterError` for logprobs of positions outside the prompt, or for too many of them."""
    limit = context_length if request.sampling.max_new_tokens == 0 else context_length - 1
    if prompt_tokens > limit:
        raise PromptTooLongError(
            f"prompt has {prompt_tokens} tokens; the limit is {limit}, because prompt and output share a context of "
            f"{context_length} tokens",
            param="prompt",
        )
    if request.return_logprob and not -1 <= request.logprob_start_len < prompt_tokens:
        raise ParameterError(
            f"logprob_start_len must be in [-1, {prompt_tokens - 1}] for {_described(request, prompt_tokens)}, got "
            f"{request.logprob_start_len}",
            param="logprob_start_len",
        )
    if request.return_logprob and request.logprob_start_len >= 0:
        per_position = request.sampling.n * (1 + request.top_logprobs_num)
        count = (prompt_tokens - request.logprob_start_len) * per_position
        if count > MAX_PROMPT_LOGPROBS:
            raise ParameterError(
                f"top_logprobs_num ({request.top_logprobs_num}) asks for {count} logprobs of "
                f"{prompt_tokens - request.logprob_start_len} prompt tokens, for n = {request.sampling.n} completions; "
                f"the limit is {MAX_PROMPT_LOGPROBS}",
                param="top_logprobs_num",
            )


def _described(request: GenerateInput, prompt_tokens: int) -> str:
    if request.session is None:
        return f"a prompt of {prompt_tokens} tokens"
    return (
        f"a turn with {prompt_tokens} new tokens in session {quote(request.session.session_id)}; "
        "for logprobs of earlier turns, send the whole conversation without the session"
    )


def expand(sampling: SamplingParams, room: int) -> list[SamplingParams]:
    """Returns the scheduler's parameters of each of the n completions. Clamps lengths to `room`, the output tokens that
    fit, adds the completion's index to the seed, and removes stop strings: only the client handles text."""
    length = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
    if sampling.n == 1 and length == sampling.max_new_tokens and not sampling.stop:
        return [sampling]
    base = dataclasses.replace(sampling, n=1, max_new_tokens=length, stop=())
    if sampling.seed is None:
        return [base] * sampling.n
    return [dataclasses.replace(base, seed=_wrap_seed(sampling.seed + index)) for index in range(sampling.n)]


def _wrap_seed(seed: int) -> int:
    return (seed + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
