"""Replicas: started, lost, restarted, drained, given up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from helpers.engine_fakes import load_echo, load_tokenizer
from helpers.whole_outputs import collect, outputs_of

from sglang_jax.config import Device, EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.replica import (
    Backoff,
    Replica,
    SharedTokenizer,
    close_replicas,
    launch_replicas,
)
from sglang_jax.engine.types import GenerateInput, ReplicaState
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import GetState

STARTING, SERVING, DRAINING, DEAD, STOPPED = ReplicaState

AT_ONCE = Backoff(first_delay=0.0, max_delay=0.0)


class ScriptedEngine:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.closed: list[bool] = []

    def die(self, reason: str) -> None:
        self.over.set_result(reason)

    async def ended(self) -> str:
        return await asyncio.shield(self.over)

    async def close(self, *, drain: bool = False) -> None:
        self.closed.append(drain)
        if not self.over.done():
            self.over.set_result("the engine was shut down")


class Starts:
    """A `start` that fails a given number of times, and keeps the engines that it started."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.engines: list[ScriptedEngine] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> ScriptedEngine:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.engines.append(ScriptedEngine())
        return self.engines[-1]


def watched(starts: Starts, backoff: Backoff = AT_ONCE) -> tuple[Replica[ScriptedEngine], list[ReplicaState]]:
    states: list[ReplicaState] = []
    replica = Replica(3, starts, backoff=backoff, on_change=lambda _: states.append(replica.state))
    return replica, states


async def test_a_lost_engine_is_replaced() -> None:
    starts = Starts()
    replica, states = watched(starts)
    await replica.start()
    first = replica.client
    starts.gate.clear()
    first.die("the engine process was killed by SIGKILL")
    waiting = asyncio.create_task(replica.serving())
    while replica.state is not STARTING:
        await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="replica 3 is starting: the engine process was killed by SIGKILL"):
        _ = replica.client
    assert not waiting.done()
    assert first.closed == [False]
    starts.gate.set()
    assert await waiting is starts.engines[1] is replica.client
    assert replica.restarts == 1
    assert states == [SERVING, DEAD, STARTING, SERVING]
    await replica.close()
    assert starts.engines[1].closed == [False]
    assert replica.state is STOPPED


async def test_a_failed_first_start_is_reported() -> None:
    starts = Starts(CheckpointError("no checkpoint at 'x'"))
    replica, _ = watched(starts)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await replica.start()
    await replica.close()


async def test_starts_are_tried_again_until_one_succeeds() -> None:
    starts = Starts()
    replica, states = watched(starts)
    await replica.start()
    starts.errors = [EngineDeadError("no such device"), OSError("cannot allocate memory")]
    starts.engines[0].die("gone")
    while replica.restarts == 0:
        await asyncio.sleep(0)
    assert states == [SERVING, DEAD, STARTING, DEAD, STARTING, DEAD, STARTING, SERVING]
    await replica.close()


async def test_given_up_after_too_many_failed_starts() -> None:
    starts = Starts()
    replica, states = watched(starts, Backoff(first_delay=0.0, max_delay=0.0, give_up=3))
    await replica.start()
    starts.errors = [EngineDeadError(f"failure {number}") for number in range(3)]
    starts.engines[0].die("gone")
    while replica.state is not STOPPED:
        await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="replica 3 is stopped: it failed to start: failure 2"):
        await replica.serving()
    assert not starts.errors
    assert len(starts.engines) == 1
    await replica.close()
    assert states[-1] is STOPPED


@pytest.mark.parametrize(
    ("max_restarts", "lived", "fails", "engines"),
    [
        (0, 0.0, 0, 1),
        (2, 0.0, 0, 3),  # each dies at once
        (2, 0.0, 1, 2),  # a start that fails counts as well
        (2, 100.0, 0, 6),  # each lasts: restarts never run out
    ],
)
async def test_given_up_after_too_many_restarts(max_restarts: int, lived: float, fails: int, engines: int) -> None:
    clock = [0.0]
    starts = Starts()
    backoff = Backoff(first_delay=0.0, max_delay=0.0, settled_after=60.0, give_up=None, max_restarts=max_restarts)
    replica = Replica(0, starts, backoff=backoff, clock=lambda: clock[0])
    await replica.start()
    starts.errors = [EngineDeadError("no such device") for _ in range(fails)]
    for number in range(5):
        while len(starts.engines) <= number and replica.state is not STOPPED:
            await asyncio.sleep(0)
        if replica.state is STOPPED:
            break
        await replica.serving()
        await asyncio.sleep(0)  # the keeper looks at its clock
        clock[0] += lived
        starts.engines[number].die(f"end {number}")
    while len(starts.engines) < engines:
        await asyncio.sleep(0)
    assert (replica.state is STOPPED) == (lived == 0.0)
    assert len(starts.engines) == engines
    await replica.close()


async def test_drains_do_not_count_as_failures() -> None:
    starts = Starts()
    replica, _ = watched(starts, Backoff(first_delay=0.0, max_delay=0.0, max_restarts=1))
    await replica.start()
    for _ in range(3):
        await replica.drain()
    starts.engines[-1].die("gone")
    while replica.restarts < 4:
        await asyncio.sleep(0)
    assert await replica.serving() is starts.engines[4]
    await replica.close()


class StuckEngine(ScriptedEngine):
    """Never finishes its requests."""

    async def close(self, *, drain: bool = False) -> None:
        if drain:
            self.closed.append(True)
            await asyncio.Event().wait()
        await super().close()


async def test_a_drain_has_a_time_limit() -> None:
    engines: list[ScriptedEngine] = []

    async def start() -> ScriptedEngine:
        engines.append(StuckEngine())
        return engines[-1]

    replica = Replica(0, start, backoff=AT_ONCE)
    await replica.start()
    await replica.drain(0.01)
    assert engines[0].closed[:2] == [True, False]
    assert replica.client is engines[1]
    await replica.close()


async def test_an_unexpected_error_ends_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    starts = Starts()
    replica, _ = watched(starts)
    await replica.start()
    starts.errors = [ZeroDivisionError("oh")]
    starts.engines[0].die("gone")
    with caplog.at_level(logging.ERROR):
        while replica.state is not STOPPED:
            await asyncio.sleep(0)
    assert "ZeroDivisionError: oh" in caplog.text
    with pytest.raises(EngineDeadError, match="ZeroDivisionError: oh"):
        await replica.serving()
    await replica.close()


async def test_drain_lets_the_engine_finish_and_starts_another() -> None:
    starts = Starts()
    replica, states = watched(starts)
    await replica.start()
    await replica.drain()
    assert starts.engines[0].closed == [True, False]
    assert replica.client is starts.engines[1]
    assert states == [SERVING, DRAINING, STARTING, SERVING]
    assert (replica.restarts, replica.last_end) == (1, "")
    await replica.close()
    with pytest.raises(EngineDeadError, match="replica 3 is stopped: only a serving replica can be drained"):
        await replica.drain()


async def test_a_drain_reports_that_no_engine_could_be_started() -> None:
    starts = Starts()
    replica, _ = watched(starts, Backoff(first_delay=0.0, max_delay=0.0, give_up=1))
    await replica.start()
    starts.errors = [ConfigError("no GPU")]
    with pytest.raises(EngineDeadError, match="it failed to start: no GPU"):
        await replica.drain()
    await replica.close()


async def test_closed_while_it_starts_again() -> None:
    starts = Starts()
    replica, _ = watched(starts)
    await replica.start()
    starts.gate.clear()
    starts.engines[0].die("gone")
    waiting = asyncio.create_task(replica.drain())
    await asyncio.wait({waiting})
    waiting = asyncio.create_task(replica.serving())
    while replica.state is not STARTING:
        await asyncio.sleep(0)
    await replica.close()
    with pytest.raises(EngineDeadError, match="it was shut down"):
        await waiting
    assert len(starts.engines) == 1


async def test_start_later_does_not_wait() -> None:
    starts = Starts(EngineDeadError("connection refused"))
    replica, states = watched(starts, Backoff(first_delay=0.0, max_delay=0.0, give_up=None))
    replica.start_later()
    assert replica.state is STARTING
    await replica.serving()
    assert states == [DEAD, STARTING, SERVING]
    await replica.close()


def test_delays_double_up_to_a_limit() -> None:
    backoff = Backoff(first_delay=1.0, max_delay=10.0)
    assert [backoff.delay(failures) for failures in range(1, 8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(("lived", "delays"), [(0.0, [0.0, 1.0, 2.0]), (100.0, [0.0, 0.0, 0.0])])
async def test_only_engines_that_die_early_delay_the_restart(lived: float, delays: list[float]) -> None:
    clock, slept = [0.0], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    starts = Starts()
    replica = Replica(
        0, starts, backoff=Backoff(first_delay=1.0, settled_after=60.0), clock=lambda: clock[0], sleep=sleep
    )
    await replica.start()
    for number in range(3):
        engine = await replica.serving()
        await asyncio.sleep(0)  # the keeper looks at its clock
        clock[0] += lived
        engine.die(f"end {number}")
        while replica.restarts == number:
            await asyncio.sleep(0)
    assert slept == delays
    await replica.close()


def test_replicas_share_a_tokenizer() -> None:
    loaded = []

    def load(config: EngineConfig) -> object:
        loaded.append(config)
        return load_tokenizer(config)

    shared = SharedTokenizer(load)
    config = EngineConfig()
    assert shared(config) is shared(config)
    assert len(loaded) == 1


async def launch_echo(config: EngineConfig, placement: Placement) -> AsyncEngineClient:
    return await launch_core(
        config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer, placement=placement
    )


async def pid_of(client: AsyncEngineClient) -> int:
    pid = (await client.call(GetState()))[0]["pid"]
    assert isinstance(pid, int)
    return pid


@pytest_asyncio.fixture
async def echoes() -> AsyncIterator[list[Replica[AsyncEngineClient]]]:
    """One for each core of this machine, two at most."""
    count = min(2, len(os.sched_getaffinity(0)))
    config = EngineConfig(model_path="echo", device=Device.CPU)
    replicas = await launch_replicas(config, count, launch=launch_echo, backoff=AT_ONCE)
    yield replicas
    await close_replicas(replicas)


async def test_processes_have_separate_cores_and_are_restarted(echoes: list[Replica[AsyncEngineClient]]) -> None:
    pids = [await pid_of(replica.client) for replica in echoes]
    affinities = [os.sched_getaffinity(pid) for pid in pids]
    assert set().union(*affinities) == os.sched_getaffinity(0)
    assert sum(map(len, affinities)) == len(os.sched_getaffinity(0))
    os.kill(pids[0], signal.SIGKILL)
    while echoes[0].restarts == 0:
        await asyncio.sleep(0.01)
    client = await echoes[0].serving()
    pid = await pid_of(client)
    assert pid not in pids
    assert os.sched_getaffinity(pid) == affinities[0]
    outputs = await collect(client, GenerateInput(prompt="abc"))
    assert [output.text for output in outputs] == ["abc"]
    assert echoes[0].last_end == "the engine is lost: the engine process was killed by SIGKILL (out of memory?)"
    assert all(replica.restarts == 0 for replica in echoes[1:])


async def test_a_drained_process_finishes_its_requests(echoes: list[Replica[AsyncEngineClient]]) -> None:
    replica = echoes[0]
    pid = await pid_of(replica.client)
    request = GenerateInput(prompt="a" * 300, sampling=SamplingParams(max_new_tokens=None), stream=True)
    stream = outputs_of(replica.client, request)
    await anext(stream)
    draining = asyncio.create_task(replica.drain())
    last = [output async for output in stream][-1]
    assert last.text == "a" * 300
    await draining
    assert await pid_of(replica.client) != pid


async def test_a_replica_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[AsyncEngineClient] = []

    async def launch(config: EngineConfig, placement: Placement) -> AsyncEngineClient:
        if placement.name == "replica 1":
            while not started:
                await asyncio.sleep(0)
            raise CheckpointError("no checkpoint at 'x'")
        started.append(await launch_echo(config, placement))
        return started[-1]

    monkeypatch.setattr("sglang_jax.runner.this_machine.os.sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(CheckpointError, match=r"^no checkpoint at 'x'$"):
        await launch_replicas(EngineConfig(model_path="echo", device=Device.CPU), 2, launch=launch)
    assert not started[0].alive
