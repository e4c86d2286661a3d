"""Outputs of a runner with drafts and without: they must be the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers import fake_grammars
from helpers.fake_grammars import FakeCompiler, FakeGrammars
from helpers.scheduling import RecordingChannel
from helpers.stand_in_subject import Narrowed
from helpers.tiny_models import TINY_VOCAB_SIZE

from sglang_jax.config import EngineConfig, SpeculativeAlgorithm
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import DraftCounts, NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

STYLES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=0.3, top_k=8, min_p=0.02, seed=11, min_new_tokens=9, stop_token_ids=(5, 6, 7, 8, 9)),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=1.1, seed=5, logit_bias={17: 3.0, 40: 2.0, 41: 2.0}),
    SamplingParams(temperature=0.0, stop=("ab", "k", "xyz")),
    SamplingParams(temperature=0.9, seed=3, stop=("q", "de")),
    SamplingParams(temperature=0.7, seed=13, grammar=fake_grammars.grammar(5)),
)
"""Stop strings are searched in texts of one letter per token. Rows with a grammar run together with the others."""

EOS = 2


def text_of(tokens: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def stopped_at(tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    """Tokens up to the end of the stop string that is complete first; None while none is complete."""
    text = text_of(tokens)
    return min((text.find(one) + len(one) for one in stop if one in text), default=None)


def requests(count: int, words: int | None = None) -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts that repeat themselves, some of which share a prefix; ways to sample; with or without logprobs. `words`:
    outputs contain only this many distinct tokens, so that drafts are accepted at random with any model."""
    rng = np.random.default_rng(count)
    made = []
    shared = np.tile(rng.integers(10, TINY_VOCAB_SIZE, 6), 5).tolist()
    for number in range(count):
        passage = rng.integers(10, TINY_VOCAB_SIZE, int(rng.integers(2, 9))).tolist()
        prompt = shared * (number % 3 == 0) + passage * int(rng.integers(1, 6))
        how = STYLES[number % len(STYLES)]
        if words is not None:
            how = replace(how, logit_bias={20 + word: 60.0 for word in range(words)})
        sampling = replace(how, max_new_tokens=int(rng.integers(max(how.min_new_tokens, 1), 50)))
        made.append((prompt, sampling, (-1, -1, 2)[number % 3]))
    return made


@dataclass(frozen=True)
class Outputs:
    """For each request its tokens and logprobs, and its draft counts."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float | None]]
    drafts: dict[int, DraftCounts]


def outputs(
    config: EngineConfig, runner: Runner, asked: list[tuple[list[int], SamplingParams, int]], at_once: int
) -> Outputs:
    """At most `at_once` requests are in flight. A request is stopped when a stop string appears, as a client
    does it."""
    channel = RecordingChannel()
    grammars: Any = FakeCompiler(FakeGrammars(runner.spec.vocab_size, EOS))
    clock = itertools.count()  # every step takes the same time, so that drafts do not depend on the machine
    scheduler = Scheduler(runner, (EOS,), config, channel, lambda: next(clock) * 1e-3, grammars)
    waiting = [
        NewRequest(
            id=number,
            token_ids=np.array(prompt, np.int32).tobytes(),
            sampling=replace(how, stop=()),
            stream=True,
            top_logprobs=k,
        )
        for number, (prompt, how, k) in enumerate(asked, 1)
    ]
    stops = {number: how.stop for number, (_, how, _) in enumerate(asked, 1) if how.stop}
    ends: dict[int, int] = {}
    while waiting or not scheduler.idle:
        while waiting and len(scheduler.requests) < at_once:
            scheduler.add(waiting.pop(0))
        scheduler.step()
        check_everything(scheduler.cache)
        for number, stop in stops.items():
            end = None if number in ends else stopped_at(channel.streams.get(number, []), stop)
            if end is not None:
                ends[number] = end
                scheduler.stop(number, end)
    numbers = range(1, len(asked) + 1)
    told = {number: channel.streams[number][: ends.get(number)] for number in numbers}
    for number in numbers:
        assert number in ends or channel.output(number) == told[number]
    logprobs = {
        number: [logprob for _, logprob in channel.logprobs.get(number, [])[: len(told[number])]] for number in numbers
    }
    return Outputs(told, logprobs, {number: channel.drafts.get(number, DraftCounts(0, 0, 0)) for number in numbers})


def check_same_outputs(
    config: EngineConfig,
    runner: Runner,
    count: int,
    at_once: int,
    reuse: bool,
    words: int | None = None,
    atol: float = 1e-3,
    adaptive: bool = False,
) -> int:
    """Compares outputs with drafts and without, and logprobs up to `atol`; returns how many drafts were accepted.
    `adaptive`: with as many drafts as pay off, instead of as many as fit."""
    config = config.model_copy(update={"disable_radix_cache": not reuse})
    plain = config.model_copy(update={"speculative_algorithm": SpeculativeAlgorithm.NONE})
    one_by_one = Narrowed(runner, replace(runner.spec, max_samples=1), lambda result: None)
    asked = requests(count, words)
    expected = outputs(plain, one_by_one, asked, at_once)
    found = outputs(config if adaptive else plain, runner, asked, at_once)
    assert found.tokens == expected.tokens
    for number, logprobs in found.logprobs.items():
        np.testing.assert_allclose(logprobs, expected.logprobs[number], atol=atol, err_msg=f"request {number}")
    for (_, sampling, _), one in zip(asked, found.drafts.values(), strict=True):
        assert one.right <= one.drafts
        assert not (sampling.counts_tokens and one.drafts), "penalties depend on the token before"
        assert not (sampling.grammar and one.drafts), "a mask tells of one token"
    return sum(one.right for one in found.drafts.values())
