"""Outputs with guessed tokens and without, of a runner that guesses: they must be the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from helpers.scheduling import RecordingChannel
from helpers.stand_in_subject import Narrowed
from helpers.tiny_models import TINY_VOCAB_SIZE

from sglang_jax.config import EngineConfig, SpeculativeAlgorithm
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import Finished, NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

STYLES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=0.3, top_k=8, min_p=0.02, seed=11, min_new_tokens=9, stop_token_ids=(5, 6, 7, 8, 9)),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=1.1, seed=5, logit_bias={17: 3.0, 40: 2.0, 41: 2.0}),
)


def requests(count: int, words: int | None = None) -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts that repeat themselves, some of which begin alike; ways to sample; logprobs or none. `words`: outputs are
    of so many tokens alone, so that guesses are right at random, whatever a model likes to say."""
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


def outputs(
    config: EngineConfig, runner: Runner, asked: list[tuple[list[int], SamplingParams, int]], at_once: int
) -> tuple[dict[int, list[int]], dict[int, list[float | None]], list[Finished]]:
    """Tokens and logprobs of each request, at most `at_once` of them in flight; and what the scheduler said last."""
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (2,), config, channel)
    waiting = [
        NewRequest(id=number, token_ids=np.array(prompt, np.int32).tobytes(), sampling=how, stream=True, top_logprobs=k)
        for number, (prompt, how, k) in enumerate(asked, 1)
    ]
    while waiting or not scheduler.idle:
        while waiting and len(scheduler.requests) < at_once:
            scheduler.add(waiting.pop(0))
        scheduler.step()
        check_everything(scheduler.cache)
    numbers = range(1, len(asked) + 1)
    logprobs = {number: [logprob for _, logprob in channel.logprobs.get(number, [])] for number in numbers}
    return {number: channel.output(number) for number in numbers}, logprobs, [channel.finished[one] for one in numbers]


def check_same_outputs(
    config: EngineConfig,
    runner: Runner,
    count: int,
    at_once: int,
    reuse: bool,
    words: int | None = None,
    atol: float = 1e-3,
) -> int:
    """Compares outputs with drafts and without, and logprobs up to `atol`; how many drafts were right."""
    config = config.model_copy(update={"disable_radix_cache": not reuse})
    plain = config.model_copy(update={"speculative_algorithm": SpeculativeAlgorithm.NONE})
    one_by_one = Narrowed(runner, replace(runner.spec, max_samples=1), lambda result: None)
    asked = requests(count, words)
    expected, expected_logprobs, _ = outputs(plain, one_by_one, asked, at_once)
    # Without a policy that measures time, so that there are as many drafts whatever the machine does.
    tokens, logprobs, ended = outputs(plain, runner, asked, at_once)
    assert tokens == expected
    for number, found in logprobs.items():
        np.testing.assert_allclose(found, expected_logprobs[number], atol=atol, err_msg=f"request {number}")
    counts = [one.drafts for one in ended if one.drafts is not None]
    assert len(counts) == count
    for (_, sampling, _), one in zip(asked, ended, strict=True):
        assert one.drafts is not None
        assert one.drafts.right <= min(one.drafts.drafts, one.num_tokens)
        assert not (sampling.counts_tokens and one.drafts.drafts), "penalties depend on the token before"
    return sum(one.right for one in counts)
