"""The client in front of an engine core that echoes prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from helpers.engine_fakes import CACHED_TOKENS, CONTEXT_LENGTH, EOS, load_echo, load_tokenizer
from helpers.whole_outputs import collect, outputs_of

from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.prompt_reader import LONG_TEXT
from sglang_jax.engine.types import FinishKind, GenerateInput, TokenLogprob
from sglang_jax.errors import CapacityError, EngineDeadError, ParameterError, PromptTooLongError
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import FlushCache, GetState

LONG = SamplingParams(max_new_tokens=None, ignore_eos=True)


async def start(model_path: str = "echo") -> AsyncEngineClient:
    config = EngineConfig(model_path=model_path)
    return await launch_core(config, in_process=True, load=load_echo, load_tokenizer=load_tokenizer)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncEngineClient]:
    client = await start()
    yield client
    await client.close()


@pytest_asyncio.fixture
async def slow_client() -> AsyncIterator[AsyncEngineClient]:
    """Five milliseconds a step."""
    client = await start("echo:0.005")
    yield client
    await client.close()


async def seen(client: AsyncEngineClient) -> list[dict[str, Any]]:
    """The requests as they reached the core."""
    state = (await client.call(GetState()))[0]
    return list(json.loads(str(state["seen"])))


async def events(client: AsyncEngineClient, kind: str) -> list[int]:
    return list(json.loads(str((await client.call(GetState()))[0][kind])))


async def test_one_finished_output(client: AsyncEngineClient) -> None:
    (output,) = await collect(client, GenerateInput(prompt="héllo", request_id="a"))
    assert (output.request_id, output.index) == ("a", 0)
    assert output.text == output.delta_text == "héllo"
    assert output.output_ids == output.delta_ids == [*"héllo".encode(), EOS]
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (6, 7, CACHED_TOKENS)
    assert output.finish is not None
    assert (output.finish.kind, output.finish.matched) == (FinishKind.STOP, EOS)
    assert output.prompt_logprobs is None
    assert not (await seen(client))[0]["stream"]


async def test_token_ids_and_length(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    (output,) = await collect(client, GenerateInput(prompt=[97, 98, 99], sampling=sampling))
    assert output.text == "ab"
    assert output.finish is not None
    assert output.finish.kind is FinishKind.LENGTH


async def test_deltas_add_up_and_no_piece_ends_inside_a_character(client: AsyncEngineClient) -> None:
    text = "a€😀 żółw"
    outputs = await collect(client, GenerateInput(prompt=text, stream=True))
    assert "".join(output.delta_text for output in outputs) == outputs[-1].text == text
    assert [i for output in outputs for i in output.delta_ids] == outputs[-1].output_ids == [*text.encode(), EOS]
    for output in outputs:
        assert text.startswith(output.text)
        assert "\N{REPLACEMENT CHARACTER}" not in output.text
        assert output.completion_tokens == len(output.output_ids)
    assert [output.finish is None for output in outputs] == [True] * (len(outputs) - 1) + [False]


async def test_text_of_a_stream_equals_the_text_at_once(client: AsyncEngineClient) -> None:
    prompt = [*"é".encode(), 0xFF, *"😀".encode()[:3], 257, 97, *"€".encode()[:1]]
    sampling = SamplingParams(skip_special_tokens=False)
    streamed = await collect(client, GenerateInput(prompt=prompt, sampling=sampling, stream=True))
    (whole,) = await collect(client, GenerateInput(prompt=prompt, sampling=sampling))
    assert streamed[-1].text == whole.text
    assert "<257>" in whole.text


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string(client: AsyncEngineClient, stream: bool) -> None:
    request = GenerateInput(prompt="one two three", sampling=SamplingParams(stop=["wo t", "zzz"]), stream=stream)
    outputs = await collect(client, request)
    last = outputs[-1]
    assert last.text == "".join(output.delta_text for output in outputs) == "one t"
    assert last.finish is not None
    assert (last.finish.kind, last.finish.matched) == (FinishKind.STOP, "wo t")
    assert bytes(last.output_ids) == b"one two t"
    assert last.completion_tokens == 9
    (on_wire,) = await seen(client)
    assert on_wire["stream"]
    assert on_wire["stop"] == []
    assert await events(client, "stopped") == [on_wire["id"]]
    assert await events(client, "aborted") == []


async def test_stop_string_kept_in_the_output(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(stop=["two"], include_stop=True)
    (output,) = await collect(client, GenerateInput(prompt="one two three", sampling=sampling))
    assert output.text == "one two"


async def test_stop_string_that_stays_partial(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(stop=["three four"])
    outputs = await collect(client, GenerateInput(prompt="one two three", sampling=sampling, stream=True))
    assert outputs[-1].text == "one two three"
    assert all(output.text in ("one two three"[:k] for k in (*range(9), 13)) for output in outputs)


async def test_a_stop_token_with_text_is_counted_and_not_shown(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(stop_token_ids=[ord("c")])
    for stream in (False, True):
        outputs = await collect(client, GenerateInput(prompt="abcd", sampling=sampling, stream=stream))
        assert outputs[-1].text == "ab"
        assert bytes(outputs[-1].output_ids) == b"abc"
        assert outputs[-1].finish is not None
        assert outputs[-1].finish.matched == ord("c")


async def test_ignored_eos_is_an_ordinary_token(client: AsyncEngineClient) -> None:
    sampling = SamplingParams(ignore_eos=True, max_new_tokens=4, skip_special_tokens=False)
    (output,) = await collect(client, GenerateInput(prompt="ab", sampling=sampling))
    assert output.text == f"ab<{EOS}><{EOS}>"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(client: AsyncEngineClient, stream: bool) -> None:
    request = GenerateInput(prompt="abc", stream=stream, return_logprob=True, logprob_start_len=1, top_logprobs_num=2)
    outputs = await collect(client, request)
    last = outputs[-1]
    ids = [97, 98, 99, EOS]
    expected = [TokenLogprob(i, -i / 10, ((-i / 10, i), (-(i + 1) / 10, i + 1))) for i in ids]
    assert last.logprobs == [entry for output in outputs for entry in output.delta_logprobs] == expected
    assert last.prompt_logprobs == expected[1:3]


async def test_logprobs_end_with_the_token_that_completed_a_stop_string(client: AsyncEngineClient) -> None:
    for stream in (False, True):
        request = GenerateInput(prompt="abcd", stream=stream, sampling=SamplingParams(stop=["bc"]), return_logprob=True)
        outputs = await collect(client, request)
        assert [entry.token_id for entry in outputs[-1].logprobs] == outputs[-1].output_ids == [97, 98, 99]
        assert outputs[-1].prompt_logprobs is None


async def test_n_completions_share_a_prompt(client: AsyncEngineClient) -> None:
    request = GenerateInput(prompt="abc", sampling=SamplingParams(n=3, seed=5, logit_bias={7: 1.5}), priority=4)
    outputs = await collect(client, request)
    assert sorted(output.index for output in outputs) == [0, 1, 2]
    on_wire = await seen(client)
    assert [message["seed"] for message in on_wire] == [5, 6, 7]
    assert [message["n"] for message in on_wire] == [1, 1, 1]
    assert all(message["logit_bias"] == {"7": 1.5} and message["priority"] == 4 for message in on_wire)


async def test_output_length_is_clamped_to_the_context(client: AsyncEngineClient) -> None:
    await collect(client, GenerateInput(prompt="abc", sampling=SamplingParams(max_new_tokens=10**6)))
    assert (await seen(client))[0]["max_new_tokens"] == CONTEXT_LENGTH - 3


async def test_long_text_is_tokenized_in_a_thread(client: AsyncEngineClient) -> None:
    text = "x" * (LONG_TEXT + 1)
    (output,) = await collect(client, GenerateInput(prompt=text, sampling=SamplingParams(max_new_tokens=5)))
    assert output.prompt_tokens == LONG_TEXT + 1


async def test_refused_before_anything_is_sent(client: AsyncEngineClient) -> None:
    with pytest.raises(PromptTooLongError, match=f"{CONTEXT_LENGTH} tokens"):
        await collect(client, GenerateInput(prompt="x" * CONTEXT_LENGTH))
    with pytest.raises(ParameterError, match="empty"):
        await collect(client, GenerateInput(prompt=""))
    assert await seen(client) == []
    assert len(await collect(client, GenerateInput(prompt="fine"))) == 1


async def test_an_error_of_the_scheduler_ends_only_that_output(client: AsyncEngineClient) -> None:
    bad, good = await asyncio.gather(
        collect(client, GenerateInput(prompt=[259, 1])), collect(client, GenerateInput(prompt="ab"))
    )
    assert bad[0].finish is not None
    assert bad[0].finish.kind is FinishKind.ERROR
    assert isinstance(bad[0].finish.error, CapacityError)
    assert bad[0].finish.error.message == "the pool is too small"
    assert good[0].text == "ab"


async def test_a_request_id_cannot_be_reused_while_its_request_runs(slow_client: AsyncEngineClient) -> None:
    first = slow_client.generate(GenerateInput(prompt="abc", sampling=LONG, request_id="a", stream=True))
    await anext(first)
    with pytest.raises(ParameterError, match="'a' belongs to a request") as caught:
        await collect(slow_client, GenerateInput(prompt="abc", request_id="a"))
    assert caught.value.param == "request_id"
    await first.aclose()
    assert len(await collect(slow_client, GenerateInput(prompt="abc", request_id="a"))) == 1


async def test_closing_early_aborts(slow_client: AsyncEngineClient) -> None:
    request = GenerateInput(
        prompt="abc", sampling=SamplingParams(n=2, max_new_tokens=None, ignore_eos=True), stream=True
    )
    outputs = slow_client.generate(request)
    await anext(outputs)
    await outputs.aclose()
    assert sorted(await events(slow_client, "aborted")) == [message["id"] for message in await seen(slow_client)]
    assert (await slow_client.call(GetState()))[0]["running"] == 0


async def test_cancelled_task_aborts(slow_client: AsyncEngineClient) -> None:
    task = asyncio.create_task(collect(slow_client, GenerateInput(prompt="abc", sampling=LONG)))
    while not await seen(slow_client):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await events(slow_client, "aborted")) == 1


async def test_an_abort_ends_the_output_with_its_tokens_so_far(slow_client: AsyncEngineClient) -> None:
    request = GenerateInput(prompt="abc" * 400, sampling=LONG, request_id="a", stream=True)
    outputs = []
    async for output in outputs_of(slow_client, request):
        outputs.append(output)
        slow_client.abort("a")
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.kind is FinishKind.ABORT
    assert 1 <= outputs[-1].completion_tokens < 1200
    assert ("abc" * 400).startswith(outputs[-1].text)
    slow_client.abort("a")
    slow_client.abort("unknown")


async def test_abort_while_the_prompt_is_tokenized(client: AsyncEngineClient) -> None:
    request = GenerateInput(prompt="x" * (LONG_TEXT + 1), request_id="a", sampling=SamplingParams(n=2))
    task = asyncio.create_task(collect(client, request))
    await asyncio.sleep(0)
    client.abort("a")
    outputs = await task
    assert [output.finish.kind for output in outputs if output.finish] == [FinishKind.ABORT] * 2
    assert await seen(client) == []


async def test_abort_all(slow_client: AsyncEngineClient) -> None:
    tasks = [asyncio.create_task(collect(slow_client, GenerateInput(prompt="a", sampling=LONG))) for _ in range(3)]
    while len(await seen(slow_client)) < 3:
        await asyncio.sleep(0.001)
    slow_client.abort_all()
    for (output,) in await asyncio.gather(*tasks):
        assert output.finish is not None
        assert output.finish.kind is FinishKind.ABORT


async def test_slow_reader_gets_fewer_and_larger_pieces(client: AsyncEngineClient) -> None:
    text = "0123456789" * 100
    request = GenerateInput(prompt=text, sampling=SamplingParams(max_new_tokens=None), stream=True)
    reader = outputs_of(client, request)
    outputs = [await anext(reader)]
    while (await client.call(GetState()))[0]["running"]:
        await asyncio.sleep(0.01)
    outputs += [output async for output in reader]
    assert len(outputs) <= 3
    assert "".join(output.delta_text for output in outputs) == text
    assert [i for output in outputs for i in output.delta_ids] == [*text.encode(), EOS]


async def test_flush_state_and_stats(slow_client: AsyncEngineClient) -> None:
    assert await slow_client.call(FlushCache())
    outputs = slow_client.generate(GenerateInput(prompt="abc", sampling=LONG, stream=True))
    await anext(outputs)
    await anext(outputs)
    assert not await slow_client.call(FlushCache())
    assert slow_client.stats.num_running == 1
    assert (await slow_client.call(GetState()))[0]["running"] == 1
    await outputs.aclose()


async def test_close_drains_on_request() -> None:
    client = await start("echo:0.002")
    task = asyncio.create_task(collect(client, GenerateInput(prompt="abc" * 20)))
    while not await seen(client):
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(client.close(drain=True))
    await asyncio.sleep(0)
    assert not client.alive
    with pytest.raises(EngineDeadError, match="shutting down"):
        await collect(client, GenerateInput(prompt="late"))
    ((output,), _) = await asyncio.gather(task, closing)
    assert output.text == "abc" * 20
    await client.close()


async def test_close_at_once_fails_what_is_in_flight_and_cuts_a_drain_short() -> None:
    client = await start("echo:0.002")
    task = asyncio.create_task(collect(client, GenerateInput(prompt="abc", sampling=LONG)))
    while not await seen(client):
        await asyncio.sleep(0.001)
    draining = asyncio.create_task(client.close(drain=True))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(client.close(), 3)
    await draining
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(EngineDeadError, match="shut down"):
        await client.call(GetState())


async def test_failure_of_the_core_fails_all_requests() -> None:
    client = await start("echo:0.002")
    running = asyncio.create_task(collect(client, GenerateInput(prompt="abc", sampling=LONG)))
    while not await seen(client):
        await asyncio.sleep(0.001)
    with pytest.raises(EngineDeadError, match="RuntimeError: the echo broke"):
        await collect(client, GenerateInput(prompt=[257]))
    with pytest.raises(EngineDeadError, match="the echo broke"):
        await running
    assert not client.alive
    with pytest.raises(EngineDeadError, match="the echo broke"):
        await collect(client, GenerateInput(prompt="abc"))
    with pytest.raises(EngineDeadError, match="the echo broke"):
        await client.call(FlushCache())
    await client.close()
