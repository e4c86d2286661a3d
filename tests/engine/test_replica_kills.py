"""Replicas that are killed under load: only the requests that they ran fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from helpers.engine_fakes import FAKE_VOCAB_SIZE, load_tokenizer
from helpers.sleeping_core import launch_sleeping, launch_sleeping_link
from helpers.whole_outputs import collect

from sglang_jax.config import Device, EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.replica import Backoff, Replica
from sglang_jax.engine.types import GenerateInput, ReplicaLoad, ReplicaState
from sglang_jax.errors import EngineDeadError, ReplicaLostError
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.sampling.params import SamplingParams

ROWS = 4
USERS = 24
OUTPUT = 24


@dataclass
class Tally:
    """Outcomes of the requests. `failed`: those that failed, by the number of the last kill before."""

    answered: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    kills: int = 0


def make_replicas(count: int) -> tuple[EngineConfig, list[Replica[CoreLink]], dict[int, int]]:
    """Replicas in separate processes, and the process id of each, which is looked up at every start."""
    config = EngineConfig(
        model_path="sleep:0.01",
        page_size=4,
        max_running_requests=ROWS,
        load_balance_method=LoadBalanceMethod.LEAST_LOADED,
    )
    pids: dict[int, int] = {}

    def start(index: int) -> Callable[[], Awaitable[CoreLink]]:
        async def launch() -> CoreLink:
            link = await launch_sleeping_link(config, Placement(name=f"replica {index}", device=Device.CPU))
            pids[index] = int(link.model_info.architecture)
            return link

        return launch

    backoff = Backoff(first_delay=0.1, max_delay=0.2)
    return config, [Replica(index, start(index), backoff=backoff) for index in range(count)], pids


async def use(client: AsyncEngineClient, tally: Tally, seed: int, over: asyncio.Event) -> None:
    """One user: request after request, each answer compared with the expected one."""
    rng = random.Random(seed)
    oracle = Oracle(FAKE_VOCAB_SIZE)
    while not over.is_set():
        prompt = [rng.randrange(1, FAKE_VOCAB_SIZE) for _ in range(rng.randrange(4, 60))]
        stream = rng.random() < 0.5
        sampling = SamplingParams(max_new_tokens=rng.randrange(1, OUTPUT), ignore_eos=True, seed=rng.randrange(1000))
        kills = tally.kills
        try:
            request = GenerateInput(prompt=prompt, sampling=sampling, stream=stream)
            outputs = await collect(client, request)
        except ReplicaLostError:
            assert tally.kills > kills, "nothing was killed while it ran"
            tally.failed[tally.kills] = tally.failed.get(tally.kills, 0) + 1
        else:
            assert outputs[-1].output_ids == oracle.output(prompt, sampling.seed or 0, sampling.max_new_tokens or 0)
            tally.answered += 1


async def kill_in_turn(
    client: AsyncEngineClient, pids: dict[int, int], tally: Tally, kills: int, seconds: float
) -> None:
    """Kills the replicas alternately while requests wait there, `seconds` apart and after every user has had at least
    one answer."""
    for number in range(kills):
        index = number % len(client.loads())
        answered = tally.answered
        await asyncio.sleep(seconds)
        while tally.answered < answered + USERS or not _is_busy(client.loads()[index]):
            await asyncio.sleep(0.001)
        tally.kills += 1
        os.kill(pids[index], signal.SIGKILL)


def _is_busy(load: ReplicaLoad) -> bool:
    return load.state is ReplicaState.SERVING and load.in_flight > ROWS and load.stats.num_waiting > 0


async def run(kills: int, seconds: float = 0.0) -> Tally:
    config, replicas, pids = make_replicas(2)
    await asyncio.gather(*(replica.start() for replica in replicas))
    client = replicated_client(config, replicas, load_tokenizer(config))
    tally, over = Tally(), asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            for user in range(USERS):
                tasks.create_task(use(client, tally, user, over))
            await kill_in_turn(client, pids, tally, kills, seconds)
            over.set()
        assert all(load.in_flight == 0 for load in client.loads())
    finally:
        await client.close()
    print(tally)
    # Only the requests that a replica ran: its rows.
    assert all(number <= ROWS for number in tally.failed.values())
    assert sum(tally.failed.values()) > kills
    return tally


async def test_only_requests_that_a_killed_replica_ran_fail() -> None:
    tally = await run(kills=3)
    assert tally.answered >= 3 * USERS


async def test_a_lost_engine_reports_which_requests_it_had_started() -> None:
    """Also of requests without any output yet, as they do not stream."""
    config = EngineConfig(model_path="sleep:0.01", page_size=4, max_running_requests=1)
    client = await launch_sleeping(config, Placement(name="replica 0", device=Device.CPU))
    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)

    async def ask(prompt: list[int]) -> bool | None:
        with pytest.raises(EngineDeadError) as lost:
            await anext(client.generate(GenerateInput(prompt=prompt, sampling=sampling)))
        return lost.value.started

    tasks = [asyncio.create_task(ask([1 + number] * 4)) for number in range(3)]
    while (client.stats.num_running, client.stats.num_waiting) != (1, 2):
        await asyncio.sleep(0.01)
    os.kill(int(client.model_info.architecture), signal.SIGKILL)
    assert await asyncio.gather(*tasks) == [True, False, False]
    await client.close()


@pytest.mark.soak
async def test_a_replica_killed_every_half_minute_for_ten_minutes() -> None:
    tally = await run(kills=20, seconds=30.0)
    assert tally.answered >= 10_000
