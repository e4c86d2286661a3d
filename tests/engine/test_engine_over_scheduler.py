"""The client and `Engine` over the real scheduler, with a runner that hashes the tokens that a row sees."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from helpers.engine_fakes import (
    FAKE_EOS,
    FAKE_INVALID,
    FAKE_VOCAB_SIZE,
    ByteTokenizer,
    load_fake_model,
    load_tokenizer,
)
from helpers.whole_outputs import collect, outputs_of

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import FinishKind, GenerateInput
from sglang_jax.errors import NumericalError, QueueFullError
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.scheduler.commands import FlushCache, GetState

ORACLE = Oracle(FAKE_VOCAB_SIZE)
LONG = SamplingParams(max_new_tokens=None, ignore_eos=True, seed=1)


async def launch(config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load_fake_model, load_tokenizer=load_tokenizer)


@pytest_asyncio.fixture(params=[True, False], ids=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngineClient]:
    config = EngineConfig(page_size=4, max_total_tokens=512, chunked_prefill_size=16)
    client = await launch_core(config, in_process=request.param, load=load_fake_model, load_tokenizer=load_tokenizer)
    yield client
    await client.close()


def expected(prompt: str, sampling: SamplingParams, index: int = 0) -> list[int]:
    """The tokens that the oracle samples, without stop strings."""
    stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {FAKE_EOS})
    length = min(sampling.max_new_tokens or 128, 128 - len(prompt))
    return ORACLE.output(list(prompt.encode()), (sampling.seed or 0) + index, length, stops)


async def assert_nothing_is_held(client: AsyncEngineClient) -> None:
    """At once, except for the step in flight."""
    held = None
    for _ in range(200):
        state = (await client.call(GetState()))[0]
        held = (state["num_running"], state["num_waiting"], state["num_used_tokens"])
        if held == (0, 0, 0):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"rows, waiting, tokens still held: {held}")


async def test_many_requests_equal_the_oracle(client: AsyncEngineClient) -> None:
    choice = random.Random(3)
    requests = [
        GenerateInput(
            prompt="shared prefix of some length "[: choice.randint(1, 29)] + f"{i}",
            sampling=SamplingParams(max_new_tokens=choice.randint(1, 12), seed=i, n=choice.randint(1, 2)),
            stream=bool(choice.getrandbits(1)),
        )
        for i in range(40)
    ]
    tokenizer = ByteTokenizer()
    for request, outputs in zip(
        requests, await asyncio.gather(*(collect(client, request) for request in requests)), strict=True
    ):
        last = {output.index: output for output in outputs if output.finish is not None}
        assert sorted(last) == list(range(request.sampling.n))
        for index, output in last.items():
            assert isinstance(request.prompt, str)
            wanted = expected(request.prompt, request.sampling, index)
            assert output.output_ids == wanted
            stopped = wanted[-1] == FAKE_EOS
            assert output.text == tokenizer.decode(wanted[:-1] if stopped else wanted)
            assert output.finish is not None
            assert output.finish.kind is (FinishKind.STOP if stopped else FinishKind.LENGTH)
    await assert_nothing_is_held(client)


async def test_stop_string_ends_the_request_and_frees_its_row(client: AsyncEngineClient) -> None:
    tokens = expected("stop me", LONG)
    stop = ByteTokenizer().decode(tokens[4:7])
    sampling = SamplingParams(max_new_tokens=None, ignore_eos=True, seed=1, stop=[stop])
    (output,) = await collect(client, GenerateInput(prompt="stop me", sampling=sampling))
    assert output.output_ids == tokens[:7]
    assert output.text == ByteTokenizer().decode(tokens[:4])
    assert output.finish is not None
    assert output.finish.matched == stop
    await assert_nothing_is_held(client)


async def test_completions_that_end_at_different_times_arrive_once_each(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(n=6, seed=3, max_new_tokens=60, stop=["never there"], stop_token_ids=range(8))
    outputs = await collect(client, GenerateInput(prompt="six", sampling=sampling))
    wanted = [expected("six", sampling, index) for index in range(6)]
    assert len({len(tokens) for tokens in wanted}) > 1
    assert {output.index: output.output_ids for output in outputs} == dict(enumerate(wanted))
    assert len(outputs) == 6
    assert all(output.finish is not None for output in outputs)


async def test_a_prefix_is_matched_again(client: AsyncEngineClient) -> None:
    request = GenerateInput(prompt="a prompt that is cached", sampling=SamplingParams(max_new_tokens=3))
    (first,) = await collect(client, request)
    (second,) = await collect(client, request)
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert await client.call(FlushCache())
    (third,) = await collect(client, request)
    assert third.cached_tokens == 0


async def test_abort_and_early_close_free_everything(client: AsyncEngineClient) -> None:
    stream = outputs_of(client, GenerateInput(prompt="abc", sampling=LONG, stream=True))
    aborted = outputs_of(client, GenerateInput(prompt="abcd", sampling=LONG, stream=True, request_id="a"))
    await anext(stream)
    await anext(aborted)
    await stream.aclose()
    client.abort("a")
    outputs = [output async for output in aborted]
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.kind in (FinishKind.ABORT, FinishKind.LENGTH)
    assert expected("abcd", LONG)[: len(outputs[-1].output_ids)] == outputs[-1].output_ids
    await assert_nothing_is_held(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prompt_and_output(client: AsyncEngineClient, stream: bool) -> None:
    prompt = "logprobs of a prompt in chunks"
    request = GenerateInput(
        prompt=prompt,
        sampling=SamplingParams(max_new_tokens=4, seed=2, ignore_eos=True),
        stream=stream,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
    )
    output = (await collect(client, request))[-1]
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == list(prompt.encode())
    assert [entry.logprob for entry in output.prompt_logprobs] == [
        None,
        *ORACLE.prompt_logprobs(list(prompt.encode())),
    ]
    assert [entry.token_id for entry in output.logprobs] == output.output_ids
    assert all([token for _, token in entry.top] == [0, 1, 2] for entry in output.logprobs)


async def test_numerical_error_touches_no_other_request() -> None:
    client = await launch(EngineConfig(model_path="numerical", page_size=4))
    sampling = SamplingParams(max_new_tokens=5, seed=1)
    bad, good = await asyncio.gather(
        collect(client, GenerateInput(prompt=[5, FAKE_INVALID])),
        collect(client, GenerateInput(prompt="good", sampling=sampling)),
    )
    assert bad[0].finish is not None
    assert isinstance(bad[0].finish.error, NumericalError)
    assert good[0].output_ids == expected("good", sampling)
    await client.close()


async def test_drain_finishes_what_was_accepted(client: AsyncEngineClient) -> None:
    tasks = [asyncio.create_task(collect(client, GenerateInput(prompt=f"drain {i}", sampling=LONG))) for i in range(12)]
    await asyncio.sleep(0)
    await client.call(GetState())
    await client.close(drain=True)
    for i, (output,) in enumerate(await asyncio.gather(*tasks)):
        assert output.output_ids == expected(f"drain {i}", LONG)


async def test_full_queue_refuses() -> None:
    client = await launch(EngineConfig(page_size=4, max_running_requests=1, max_queued_requests=1))
    results = await asyncio.gather(*(collect(client, GenerateInput(prompt=f"{i}", sampling=LONG)) for i in range(6)))
    errors = [output.finish.error for (output,) in results if output.finish and output.finish.error]
    assert errors
    assert all(isinstance(error, QueueFullError) and error.status == 503 for error in errors)
    assert any(output.finish and output.finish.kind is FinishKind.LENGTH for (output,) in results)
    await client.close()


def test_batch_larger_than_the_queue_is_never_refused() -> None:
    config = EngineConfig(page_size=4, max_running_requests=2, max_queued_requests=2, max_total_tokens=256)
    with Engine(config, launch=launch) as engine:
        prompts = [f"prompt {i}" for i in range(30)]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=4, seed=9))
        assert isinstance(outputs, list)
        sampling = SamplingParams(max_new_tokens=4, seed=9)
        assert [output.output_ids for output in outputs] == [expected(prompt, sampling) for prompt in prompts]
        assert engine.state()["num_used_tokens"] == 0
