"""Requests for no output tokens: the prompt is computed and its logprobs are published, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from helpers.engine_fakes import (
    CACHED_TOKENS,
    CONTEXT_LENGTH,
    FAKE_VOCAB_SIZE,
    ByteTokenizer,
    load_echo,
    load_tokenizer,
)
from helpers.replica_fakes import AT_ONCE, fake_replicas
from helpers.whole_outputs import collect

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine import validation
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import launch_core, launch_link
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.replica import Replica
from sglang_jax.engine.types import EngineClient, FinishKind, FinishReason, GenerateInput, GenerateOutput
from sglang_jax.errors import ParameterError, PromptTooLongError
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.scheduler.commands import FlushCache, GetState

NONE = SamplingParams(max_new_tokens=0)
LENGTH = FinishReason(FinishKind.LENGTH)
FAKE_CONTEXT = 128


def test_zero_is_a_valid_number_of_tokens() -> None:
    assert SamplingParams(max_new_tokens=0, min_new_tokens=0).max_new_tokens == 0
    with pytest.raises(ParameterError, match=r"max_new_tokens must be an integer in \[0, 2147483647\], got -1"):
        SamplingParams(max_new_tokens=-1)
    with pytest.raises(ParameterError, match=r"min_new_tokens must be an integer in \[0, 0\], got 1"):
        SamplingParams(max_new_tokens=0, min_new_tokens=1)


def test_a_prompt_without_output_may_fill_the_context() -> None:
    alone = GenerateInput(prompt="a", sampling=NONE)
    validation.check_length(alone, CONTEXT_LENGTH, CONTEXT_LENGTH)
    with pytest.raises(PromptTooLongError, match=f"{CONTEXT_LENGTH + 1} tokens; the limit is {CONTEXT_LENGTH},"):
        validation.check_length(alone, CONTEXT_LENGTH + 1, CONTEXT_LENGTH)
    for most in (1, None):
        request = GenerateInput(prompt="a", sampling=SamplingParams(max_new_tokens=most))
        with pytest.raises(PromptTooLongError, match=f"the limit is {CONTEXT_LENGTH - 1},"):
            validation.check_length(request, CONTEXT_LENGTH, CONTEXT_LENGTH)


@pytest.mark.parametrize("room", [0, 10])
def test_zero_tokens_stay_zero_for_any_room(room: int) -> None:
    each = validation.expand(SamplingParams(max_new_tokens=0, n=2), room)
    assert [one.max_new_tokens for one in each] == [0, 0]


async def one_engine(load: CoreLoader, config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load, load_tokenizer=load_tokenizer)


async def two_replicas(load: CoreLoader, config: EngineConfig) -> EngineClient:
    async def start() -> CoreLink:
        return await launch_link(config, in_process=True, load=load)

    replicas = [Replica(index, start, backoff=AT_ONCE) for index in range(2)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    return replicated_client(config, replicas, ByteTokenizer())


Start = Callable[[CoreLoader, EngineConfig], Awaitable[EngineClient]]


@pytest_asyncio.fixture(params=[one_engine, two_replicas])
async def echo(request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    start: Start = request.param
    client = await start(load_echo, EngineConfig(model_path="echo"))
    yield client
    await client.close()


def check_empty(output: GenerateOutput, prompt_tokens: int) -> None:
    assert (output.text, output.delta_text, output.output_ids, output.delta_ids) == ("", "", [], [])
    assert (output.logprobs, output.delta_logprobs) == ([], [])
    assert (output.prompt_tokens, output.completion_tokens) == (prompt_tokens, 0)
    assert output.finish == LENGTH


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [(), ("x",)])
async def test_there_is_one_empty_output(echo: EngineClient, stream: bool, stop: tuple[str, ...]) -> None:
    sampling = SamplingParams(max_new_tokens=0, stop=stop)
    request = GenerateInput(prompt="ABC", sampling=sampling, stream=stream, return_logprob=True, logprob_start_len=1)
    [output] = await collect(echo, request)
    check_empty(output, 3)
    assert output.cached_tokens == CACHED_TOKENS
    assert output.prompt_logprobs is not None
    assert [(one.token_id, one.logprob) for one in output.prompt_logprobs] == [(66, -6.6), (67, -6.7)]


async def test_each_completion_has_the_prompts_logprobs(echo: EngineClient) -> None:
    sampling = SamplingParams(max_new_tokens=0, n=3)
    request = GenerateInput(prompt="AB", sampling=sampling, return_logprob=True, logprob_start_len=0)
    outputs = await collect(echo, request)
    assert sorted(output.index for output in outputs) == [0, 1, 2]
    for output in outputs:
        check_empty(output, 2)
        assert output.prompt_logprobs is not None
        assert [one.token_id for one in output.prompt_logprobs] == [65, 66]


async def launch_echo(config: EngineConfig) -> AsyncEngineClient:
    return await one_engine(load_echo, config)


def test_engine_in_a_script() -> None:
    with Engine(model_path="echo", launch=launch_echo) as engine:
        options = {"return_logprob": True, "logprob_start_len": 0}
        output = engine.generate("AB", NONE, return_logprob=True, logprob_start_len=0)
        assert isinstance(output, GenerateOutput)
        check_empty(output, 2)
        assert output.prompt_logprobs is not None
        [streamed] = engine.generate("AB", {"max_new_tokens": 0}, stream=True)
        check_empty(streamed, 2)
        items = ["AB", {"prompt": "C", **options}, {"prompt": "DE", "max_new_tokens": 1}]
        results = list(engine.batch(items, {"max_new_tokens": 0}, ordered=True))
        assert [result.text for result in results] == ["", "", "D"]
        [scored] = results[1].outputs
        assert scored.prompt_logprobs is not None
        assert [one.token_id for one in scored.prompt_logprobs] == [67]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_over_the_scheduler(replicas: int, stream: bool) -> None:
    """Prompts of up to the whole context, together with requests that generate, and again once they are cached."""
    config = EngineConfig(page_size=4, max_total_tokens=512, chunked_prefill_size=16)
    client = await fake_replicas(replicas, LoadBalanceMethod.ROUND_ROBIN, config)
    oracle = Oracle(FAKE_VOCAB_SIZE)
    prompts = [[1 + (3 * i + k) % 120 for i in range(length)] for k, length in enumerate((1, 4, 37, FAKE_CONTEXT))]

    async def score(prompt: list[int]) -> None:
        request = GenerateInput(prompt=prompt, sampling=NONE, stream=stream, return_logprob=True, logprob_start_len=0)
        [output] = await collect(client, request)
        check_empty(output, len(prompt))
        assert output.prompt_logprobs is not None
        assert [one.logprob for one in output.prompt_logprobs] == [None, *oracle.prompt_logprobs(prompt)]

    async def sample(prompt: list[int]) -> None:
        sampling = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
        output = (await collect(client, GenerateInput(prompt=prompt, sampling=sampling, stream=stream)))[-1]
        assert output.output_ids == oracle.output(prompt, 1, 5, set())

    for _ in range(2):
        await asyncio.gather(*map(score, prompts), *map(sample, prompts[:-1]))
    [cached] = await collect(client, GenerateInput(prompt=prompts[2], sampling=NONE))
    check_empty(cached, 37)
    assert await client.call(FlushCache())
    assert all(state["num_used_tokens"] == 0 for state in await client.call(GetState()))
    await client.close()
