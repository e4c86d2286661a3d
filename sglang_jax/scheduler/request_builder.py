"""Checks `NewRequest` messages and makes requests of them."""

from __future__ import annotations

import numpy as np

from sglang_jax.errors import ParameterError, PromptTooLongError, QueueFullError
from sglang_jax.runner.plan import Int32, RunnerSpec
from sglang_jax.sampling.params import MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams
from sglang_jax.sampling.wants import MAX_SCORED_TOKENS, Samples, TokenScores, check_wants
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.request import Request, RequestState

_SEED_MASK = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RequestBuilder:
    """Checks and completes new requests. `eos_ids` end any request that does not ignore them; `random_seed` determines
    the seeds of requests without one, by order of arrival; `max_queued`: maximum waiting requests (None: no limit)."""

    def __init__(self, spec: RunnerSpec, eos_ids: tuple[int, ...], random_seed: int, max_queued: int | None) -> None:
        self._spec = spec
        self._eos_ids = eos_ids
        self._random_seed = random_seed
        self._max_queued = max_queued
        self._needs_all_tokens = spec.whole_prompts or (spec.pooling is not None and spec.pooling.needs_all_tokens)
        self._count = 0
        self._no_stops: Int32 = np.zeros(0, np.int32)
        self._eos_stops: Int32 = np.array(list(dict.fromkeys(eos_ids)), np.int32)
        for shared in (self._no_stops, self._eos_stops):
            shared.setflags(write=False)

    def accept(self, message: NewRequest, num_waiting: int) -> Request:
        """The request of a message, while `num_waiting` others wait. Raises `RequestError` if it is invalid or the
        queue is full."""
        most = self._max_queued
        if most is not None and message.background:
            most = -(-most // 2)  # the other half is left to requests whose clients wait
        if most is not None and num_waiting >= most:
            raise QueueFullError(f"{num_waiting} requests wait, the limit is {most}; try again later")
        self._check_wants(message)
        prompt_len = self._check_prompt(message.token_ids, message.sampling.max_new_tokens != 0)
        message.sampling.check_vocabulary(self._spec.vocab_size)
        if not -1 <= message.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ParameterError(
                f"top_logprobs must be in [-1, {MAX_TOP_LOGPROBS}], got {message.top_logprobs}", param="top_logprobs"
            )
        self._count += 1
        wanted = message.logprob_start
        first_logprob = prompt_len if wanted < 0 else min(wanted, prompt_len)
        return Request(
            id=message.id,
            sequence=self._count,
            sampling=message.sampling,
            seed=self._seed(message.sampling),
            tokens=message.token_ids,
            prompt_len=prompt_len,
            total_len=self._total_len(message.sampling, prompt_len),
            stop_ids=self._stop_ids(message.sampling),
            stream=message.stream,
            top_logprobs=message.top_logprobs,
            next_prompt_logprob=first_logprob,
            published_prompt_logprob=first_logprob,
            namespace=message.extra_key,
            priority=message.priority,
            flow_key=(message.tenant, message.flow),
            arrival=message.arrival,
            shared_len=message.shared_len,
            background=message.background,
            wants=message.wants,
            needs_all_tokens=self._needs_all_tokens,
            state=RequestState.WAITING if message.sampling.grammar is None else RequestState.COMPILING,
        )

    def _check_wants(self, message: NewRequest) -> None:
        wants = message.wants
        check_wants(wants, pools=self._spec.pooling is not None)
        if isinstance(wants, Samples):
            return
        if message.sampling.max_new_tokens != 0 or message.logprob_start >= 0 or message.top_logprobs >= 0:
            raise ParameterError("a request for a vector or for scores samples nothing and has no logprobs")
        if not isinstance(wants, TokenScores):
            return
        ids = wants.token_ids
        if not 1 <= len(ids) <= MAX_SCORED_TOKENS:
            raise ParameterError(
                f"scores of {len(ids)} tokens are asked for; the limits are 1 and {MAX_SCORED_TOKENS}",
                param="label_token_ids",
            )
        outside = [token for token in ids if not 0 <= token < self._spec.vocab_size]
        if outside:
            raise ParameterError(
                f"label_token_ids holds {outside[0]}, the vocabulary is [0, {self._spec.vocab_size - 1}]",
                param="label_token_ids",
            )

    def _check_prompt(self, token_ids: bytes, samples: bool) -> int:
        if not token_ids or len(token_ids) % 4:
            raise ParameterError(f"the prompt must hold at least one token, got {len(token_ids)} bytes", param="prompt")
        tokens = np.frombuffer(token_ids, np.int32)
        if len(tokens) + samples > self._spec.max_context:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens; at most {self._spec.max_context - samples} fit, with room for "
                f"{'one output token' if samples else 'no output'} in the context of {self._spec.max_context}",
                param="prompt",
            )
        if int(tokens.view(np.uint32).max()) >= self._spec.vocab_size:  # as unsigned, a negative id is a large number
            low, high = int(tokens.min()), int(tokens.max())
            raise ParameterError(
                f"the prompt holds token id {low if low < 0 else high}, "
                f"the vocabulary is [0, {self._spec.vocab_size - 1}]",
                param="prompt",
            )
        return len(tokens)

    def _total_len(self, sampling: SamplingParams, prompt_len: int) -> int:
        if sampling.max_new_tokens is None:
            return self._spec.max_context
        return min(prompt_len + sampling.max_new_tokens, self._spec.max_context)

    def _stop_ids(self, sampling: SamplingParams) -> Int32:
        if not sampling.stop_token_ids and len(self._eos_stops) <= MAX_STOP_TOKEN_IDS:
            return self._no_stops if sampling.ignore_eos else self._eos_stops
        ids = dict.fromkeys(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ids |= dict.fromkeys(self._eos_ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                f"{len(ids)} token ids would end the request, the limit is {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
            )
        return np.array(list(ids), np.int32)

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.seed is not None:
            return sampling.seed & _SEED_MASK
        return arrival_seed(self._random_seed, self._count)


def arrival_seed(random_seed: int, count: int) -> int:
    """The seed of the `count`-th request, counted from 1, if it has none (SplitMix64, Steele et al. 2014)."""
    mixed = (random_seed + count * _GOLDEN) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & _SEED_MASK
