"""Several replicas together, on real schedulers over fake devices: the answers of one, in half the steps."""

from __future__ import annotations

import asyncio
import threading

import pytest
from helpers.engine_fakes import FAKE_VOCAB_SIZE, ByteTokenizer, FakeModelCore
from helpers.replica_fakes import fake_replicas, shared_prefix_prompts
from helpers.whole_outputs import collect

from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.router import Router
from sglang_jax.engine.single_link import SingleLink
from sglang_jax.engine.types import GenerateInput
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import GetState

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)


def fake_config(**options: object) -> EngineConfig:
    return EngineConfig(
        **{"page_size": 4, "max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 64, **options}
    )


async def run_all(client: AsyncEngineClient, requests: list[GenerateInput], at_once: int = 8) -> list[list[list[int]]]:
    """Output ids of each request's completions."""
    limit = asyncio.Semaphore(at_once)

    async def run(request: GenerateInput) -> list[list[int]]:
        async with limit:
            return [output.output_ids for output in sorted(await collect(client, request), key=lambda one: one.index)]

    return await asyncio.gather(*(run(request) for request in requests))


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.0, max_new_tokens=12)], ids=["greedy", "sampled"]
)
async def test_outputs_are_those_of_one_replica(sampling: SamplingParams) -> None:
    prompts = shared_prefix_prompts(6, 8, 24, 8, FAKE_VOCAB_SIZE - 1)
    requests = [GenerateInput(prompt=prompt, sampling=sampling) for prompt in prompts]
    answers = []
    for count in (1, 3):
        for method in LoadBalanceMethod:
            client = await fake_replicas(count, method, fake_config(random_seed=7))
            answers.append(await run_all(client, requests))
            assert all(state["num_finished"] for state in await client.call(GetState()))
            await client.close()
    assert all(answer == answers[0] for answer in answers)


async def test_requests_without_a_seed_sample_the_same_as_on_one_engine() -> None:
    """Whichever replica they go to, though all replicas have the same seed."""
    requests = [GenerateInput(prompt=[5, 6, 7], sampling=SamplingParams(max_new_tokens=12)) for _ in range(16)]
    client = await fake_replicas(2, LoadBalanceMethod.ROUND_ROBIN, fake_config())
    outputs = await run_all(client, requests)
    assert len({tuple(ids) for (ids,) in outputs}) == len(requests)
    await client.close()
    single = await fake_replicas(1, LoadBalanceMethod.ROUND_ROBIN, fake_config())
    assert isinstance(single.links, Router)
    link = single.links.replicas[0].client
    assert isinstance(link, CoreLink)
    engine = AsyncEngineClient(SingleLink(link), ByteTokenizer())
    assert outputs == [[one.output_ids for one in await collect(engine, request)] for request in requests]
    await single.close()


async def most_steps(count: int, method: LoadBalanceMethod) -> int:
    """Steps of the replica that ran most, for the same work: a measure of the time on devices. No replica starts before
    each request has been routed, so no step waits for the host."""
    all_sent = threading.Event()

    class HeldCore(FakeModelCore):
        def run(self) -> None:
            all_sent.wait()
            super().run()

    client = await fake_replicas(count, method, fake_config(max_total_tokens=4096), HeldCore)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    prompts = shared_prefix_prompts(64, 8, 16, 8, FAKE_VOCAB_SIZE - 1)
    requests = [GenerateInput(prompt=prompt, sampling=sampling) for prompt in prompts]
    work = asyncio.create_task(run_all(client, requests, at_once=len(requests)))
    try:
        while not work.done() and sum(load.in_flight for load in client.loads()) < len(requests):
            await asyncio.sleep(0.01)
    finally:
        all_sent.set()
    await work
    states = await client.call(GetState())
    await client.close()
    return max(int(str(state["steps"])) for state in states)


@pytest.mark.parametrize("method", [LoadBalanceMethod.ROUND_ROBIN, LoadBalanceMethod.LEAST_LOADED])
async def test_two_replicas_take_half_the_steps(method: LoadBalanceMethod) -> None:
    one, two = await most_steps(1, method), await most_steps(2, method)
    print(f"{method}: {one} steps, {two} with two replicas")
    assert one >= 1.85 * two


async def hit_rate(method: LoadBalanceMethod, count: int, groups: int, each: int) -> float:
    """Hit rate for groups that share 64 of 72 tokens, on replicas that each have room for half of the prefixes."""
    pool = groups * 64 // count * 3 // 2
    client = await fake_replicas(count, method, fake_config(max_total_tokens=pool))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    prompts = shared_prefix_prompts(groups, each, 64, 8, FAKE_VOCAB_SIZE - 1)
    await run_all(client, [GenerateInput(prompt=prompt, sampling=sampling) for prompt in prompts])
    states = await client.call(GetState())
    await client.close()
    assert sum(int(str(state["prompt_tokens"])) for state in states) == groups * each * 72
    return sum(int(str(state["cached_tokens"])) for state in states) / (groups * each * 72)


@pytest.mark.parametrize("count", [2, 4])
async def test_cache_aware_routing_has_half_as_many_hits_again(count: int) -> None:
    """50 groups of 10 prompts, whose prefixes fit into the pools of all replicas together, but not into one."""
    aware = await hit_rate(LoadBalanceMethod.CACHE_AWARE, count, 50, 10)
    in_turn = await hit_rate(LoadBalanceMethod.ROUND_ROBIN, count, 50, 10)
    print(f"{count} replicas: cache_aware {aware:.3f}, round_robin {in_turn:.3f}")
    assert aware >= 1.5 * in_turn
    assert aware > 0.7 * 0.9 * 64 / 72
