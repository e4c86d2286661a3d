"""Several replicas behind one client: which request goes where, and what happens to it when a replica is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

import pytest
import pytest_asyncio
from helpers.engine_fakes import CONTEXT_LENGTH
from helpers.replica_fakes import ScriptedLink, ScriptedReplicas
from helpers.whole_outputs import collect

from sglang_jax.config import LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.router import MAX_REROUTES, total_stats
from sglang_jax.engine.types import FinishKind, GenerateInput, GenerateOutput, ReplicaState
from sglang_jax.errors import (
    CapacityError,
    EngineDeadError,
    ParameterError,
    PromptTooLongError,
    QueueFullError,
    ReplicaLostError,
)
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import COMMANDS, FlushCache, GetState, StartProfile, StopProfile
from sglang_jax.scheduler.messages import ExpertBalance, GroupUsage, SchedulerStats


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come true")


def ask(client: AsyncEngineClient, prompt: str = "abc", **fields: object) -> asyncio.Task[list[GenerateOutput]]:
    return asyncio.create_task(collect(client, GenerateInput(prompt=prompt, **fields)))


@pytest.fixture
def two() -> ScriptedReplicas:
    return ScriptedReplicas(2)


@pytest_asyncio.fixture
async def client(two: ScriptedReplicas) -> AsyncIterator[AsyncEngineClient]:
    client = await two.client()
    yield client
    await client.close()


def only(engine: ScriptedLink) -> str:
    (name,) = engine.asked
    return name


async def test_requests_are_distributed_and_keep_their_names(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    tasks = [ask(client, request_id=f"mine-{number}") for number in range(4)]
    await until(lambda: sum(len(two.engine(index).asked) for index in (0, 1)) == 4)
    assert [load.in_flight for load in client.loads()] == [2, 2]
    for index in (0, 1):
        assert all(list(request.token_ids) == [97, 98, 99] for request in two.engine(index).asked.values())
        two.engine(index).answer_all()
    outputs = [output for task in tasks for output in await task]
    assert [output.request_id for output in outputs] == [f"mine-{number}" for number in range(4)]
    assert [load.in_flight for load in client.loads()] == [0, 0]


async def test_bad_requests_reach_no_replica(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    for prompt, error in (("", ParameterError), ([-1], ParameterError), ([1] * CONTEXT_LENGTH, PromptTooLongError)):
        with pytest.raises(error):
            await collect(client, GenerateInput(prompt=prompt))
    running = ask(client, request_id="a")
    await until(lambda: bool(two.engine(0).asked))
    with pytest.raises(ParameterError, match="request_id 'a' belongs to a request that is still running"):
        await collect(client, GenerateInput(prompt="x", request_id="a"))
    two.engine(0).answer_all()
    await running
    assert not two.engine(1).asked


async def test_requests_that_a_lost_replica_had_not_started_go_to_another(
    two: ScriptedReplicas, client: AsyncEngineClient
) -> None:
    waiting = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    two.gates[0].clear()
    two.engine(0).die()
    await until(lambda: bool(two.engine(1).asked))
    two.engine(1).answer_all()
    assert [output.text for output in await waiting] == ["done"]


async def test_requests_that_a_lost_replica_ran_fail_cleanly(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    running = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    two.engine(0).started.add(only(two.engine(0)))
    two.engine(0).die("killed by SIGKILL")
    with pytest.raises(
        ReplicaLostError, match=r"replica 0 was lost while it ran the request \(killed by SIGKILL\)"
    ) as lost:
        await running
    assert (lost.value.status, lost.value.code) == (503, "replica_lost")
    assert not two.engine(1).asked


async def test_a_request_with_output_is_not_restarted(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    running = ask(client, sampling=SamplingParams(n=2))
    await until(lambda: bool(two.engine(0).asked))
    two.engine(0).answer(only(two.engine(0)), 1)
    await asyncio.sleep(0)
    two.engine(0).die()
    with pytest.raises(ReplicaLostError):
        await running


async def test_a_request_that_kills_replicas_is_given_up(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    poison = ask(client)
    killed = 0
    while not poison.done():
        await until(lambda: poison.done() or any(two.engine(index).asked for index in (0, 1)))
        for index in (0, 1):
            if two.engine(index).asked:
                two.engine(index).die()
                killed += 1
                await asyncio.sleep(0)
    with pytest.raises(ReplicaLostError):
        await poison
    assert killed == MAX_REROUTES + 1


async def test_a_request_that_may_have_started_is_tried_once_more(
    two: ScriptedReplicas, client: AsyncEngineClient
) -> None:
    unsure = ask(client)
    for index in (0, 1):
        await until(lambda index=index: bool(two.engine(index).asked))
        two.engine(index).fail(only(two.engine(index)), EngineDeadError("the connection broke", started=None))
    with pytest.raises(ReplicaLostError, match="replica 1 was lost"):
        await unsure


async def test_requests_wait_while_no_replica_serves(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    for index in (0, 1):
        two.gates[index].clear()
        two.engine(index).die()
    assert not client.alive
    waiting = [ask(client, request_id=name) for name in "ab"]
    await until(lambda: two.router.num_waiting == 2)
    client.abort("b")
    assert [output.finish.kind for output in await waiting[1] if output.finish] == [FinishKind.ABORT]
    two.gates[1].set()
    await until(lambda: len(two.engines[1]) == 2 and bool(two.engine(1).asked))
    two.engine(1).answer_all()
    assert [output.text for output in await waiting[0]] == ["done"]


async def test_a_bounded_number_of_requests_wait_while_no_replica_serves(two: ScriptedReplicas) -> None:
    client = await two.client(max_waiting=1)
    for index in (0, 1):
        two.gates[index].clear()
        two.engine(index).die()
    waiting = ask(client)
    await until(lambda: two.router.num_waiting == 1)
    with pytest.raises(QueueFullError, match="no replica is serving, and 1 requests are queued, the limit is 1"):
        await collect(client, GenerateInput(prompt="x"))
    await client.close()
    with pytest.raises(EngineDeadError, match=r"no replica is left \(0: it was shut down; 1: it was shut down\)"):
        await waiting


async def test_no_replica_is_left(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    for index in (0, 1):
        two.failures[index] = EngineDeadError("no such device")
        two.engine(index).die()
    with pytest.raises(EngineDeadError, match=r"no replica is left .*no such device"):
        await collect(client, GenerateInput(prompt="x"))
    assert [load.state for load in client.loads()] == [ReplicaState.STOPPED] * 2


async def test_a_full_queue_sends_the_request_on(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    request = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    two.engine(0).answer(only(two.engine(0)), error=QueueFullError("8 requests wait"))
    await until(lambda: bool(two.engine(1).asked))
    two.engine(1).answer(only(two.engine(1)), error=QueueFullError("8 requests wait"))
    with pytest.raises(QueueFullError, match="the queues of all serving replicas are full"):
        await request


async def test_other_errors_end_the_request(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    request = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    two.engine(0).answer(only(two.engine(0)), error=CapacityError("too large"))
    (output,) = await request
    assert output.finish is not None
    assert isinstance(output.finish.error, CapacityError)
    assert not two.engine(1).asked


async def test_abort_reaches_the_replica_that_has_the_request(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    tasks = [ask(client, request_id=name) for name in "ab"]
    await until(lambda: bool(two.engine(0).asked and two.engine(1).asked))
    client.abort("b")
    client.abort("nobody")
    assert (two.engine(0).aborted, two.engine(1).aborted) == ([], [only(two.engine(1))])
    client.abort_all()
    assert two.engine(0).aborted == [only(two.engine(0))]
    for index in (0, 1):
        two.engine(index).answer_all()
    await asyncio.gather(*tasks)


async def test_an_aborted_request_is_not_sent_to_another_replica(
    two: ScriptedReplicas, client: AsyncEngineClient
) -> None:
    task = ask(client, request_id="a", sampling=SamplingParams(n=2))
    await until(lambda: bool(two.engine(0).asked))
    client.abort("a")
    two.engine(0).die()
    outputs = await task
    assert [(output.index, output.finish.kind) for output in outputs if output.finish] == [
        (0, FinishKind.ABORT),
        (1, FinishKind.ABORT),
    ]
    assert {(output.request_id, output.prompt_tokens) for output in outputs} == {("a", 3)}


async def test_leaving_early_ends_the_request_at_its_replica(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    task = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    task.cancel()
    await asyncio.wait({task})
    assert not two.engine(0).asked
    assert [load.in_flight for load in client.loads()] == [0, 0]


async def test_a_flush_reaches_all_replicas_and_only_when_idle(
    two: ScriptedReplicas, client: AsyncEngineClient
) -> None:
    assert await client.call(FlushCache())
    assert [two.engine(index).flushed for index in (0, 1)] == [1, 1]
    two.engine(1).busy = True
    assert not await client.call(FlushCache())
    task = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    assert not await client.call(FlushCache())
    assert [two.engine(index).flushed for index in (0, 1)] == [2, 2]
    two.engine(0).answer_all()
    await task


async def test_states_and_figures_cover_all_replicas(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    two.gates[1].clear()
    two.engine(1).die("killed")
    await until(lambda: client.loads()[1].state is ReplicaState.STARTING)
    assert await client.call(GetState()) == [
        {"replica": 0, "replica_state": "serving", "steps": 3},
        {"replica": 1, "replica_state": "starting"},
    ]
    assert (client.stats.num_running, client.stats.prompt_tokens, client.stats.cached_tokens) == (1, 10, 4)
    assert client.max_running_requests == 4
    assert client.loads()[1].last_end == "killed"
    two.gates[1].set()
    await until(lambda: client.loads()[1].state is ReplicaState.SERVING)
    assert (client.stats.num_running, client.stats.prompt_tokens, client.loads()[1].restarts) == (2, 20, 1)


async def test_a_rolling_drain_refuses_no_request(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    running = [ask(client) for _ in range(2)]
    await until(lambda: bool(two.engine(0).asked and two.engine(1).asked))
    drain = asyncio.create_task(client.drain())
    await until(lambda: two.replicas[0].state is ReplicaState.DRAINING)
    with pytest.raises(ParameterError, match="replicas are already being drained"):
        await client.drain(1)
    late = ask(client)
    await until(lambda: len(two.engine(1).asked) == 2)
    two.engine(0).answer_all()
    await until(lambda: two.replicas[1].state is ReplicaState.DRAINING)
    later = ask(client)
    await until(lambda: bool(two.engine(0).asked))
    two.engine(1).answer_all()
    await drain
    two.engine(0).answer_all()
    for task in (*running, late, later):
        assert [output.text for output in await task] == ["done"]
    assert [len(engines) for engines in two.engines] == [2, 2]
    with pytest.raises(ParameterError, match="replica must be from 0 to 1, got 2"):
        await client.drain(2)


async def test_the_only_replica_can_be_drained() -> None:
    one = ScriptedReplicas(1)
    client = await one.client()
    one.gates[0].clear()
    drain = asyncio.create_task(client.drain())
    await until(lambda: one.replicas[0].state is ReplicaState.STARTING)
    one.router._draining = False
    with pytest.raises(ParameterError, match="replica 0 is starting; only serving replicas can be drained"):
        await client.drain(0)
    waiting = ask(client)
    await until(lambda: one.router.num_waiting == 1)
    one.gates[0].set()
    await drain
    await until(lambda: bool(one.engine(0).asked))
    one.engine(0).answer_all()
    await waiting
    await client.close()


async def test_routing_follows_load_which_counts_completions(two: ScriptedReplicas) -> None:
    client = await two.client(LoadBalanceMethod.LEAST_LOADED)
    tasks = [ask(client, sampling=SamplingParams(n=3))]
    await until(lambda: bool(two.engine(0).asked))
    tasks += [ask(client) for _ in range(3)]
    await until(lambda: len(two.engine(1).asked) == 3)
    two.engine(0).external_load = 5
    tasks += [ask(client)]
    await until(lambda: len(two.engine(1).asked) == 4)
    for index in (0, 1):
        two.engine(index).answer_all()
    await asyncio.gather(*tasks)
    await client.close()


async def test_keys_stay_with_their_replica_until_it_is_gone(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    async def homes() -> dict[str, int]:
        found = {}
        for key in "abcdefgh":
            task = ask(client, routing_key=key)
            await until(lambda: any(engines[-1].asked for engines in two.engines))
            found[key] = next(index for index in (0, 1) if two.engine(index).asked)
            two.engine(found[key]).answer_all()
            await task
        return found

    first = await homes()
    assert set(first.values()) == {0, 1}
    assert await homes() == first
    two.gates[0].clear()
    two.engine(0).die()
    assert set((await homes()).values()) == {1}
    two.gates[0].set()
    await until(lambda: two.replicas[0].state is ReplicaState.SERVING)
    assert await homes() == first


def test_pools_of_all_replicas_are_added_up_by_name() -> None:
    full, swa = GroupUsage("full", 10, 100), GroupUsage("swa", 30, 40, session_tokens=7)
    several = [
        SchedulerStats(groups=[full, swa], steps=2, weight_version="new"),
        SchedulerStats(weight_version="new"),
        SchedulerStats(groups=[full, swa], steps=3, weight_version="new"),
    ]
    total = total_stats(several)
    assert total.weight_version == "new"
    assert total_stats([*several, SchedulerStats()]).weight_version == "", "they differ"
    assert total.groups == [GroupUsage("full", 20, 200), GroupUsage("swa", 60, 80, session_tokens=14)]
    assert (total.steps, total.token_usage) == (5, 0.75)


async def test_the_state_of_a_replica_that_does_not_answer(
    two: ScriptedReplicas, client: AsyncEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(command: GetState) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail(command: GetState) -> NoReturn:
        raise EngineDeadError("killed")

    monkeypatch.setitem(COMMANDS, GetState, dataclasses.replace(COMMANDS[GetState], seconds=0.01))
    monkeypatch.setattr(two.engine(0), "call", hang)
    monkeypatch.setattr(two.engine(1), "call", fail)
    assert await client.call(GetState()) == [
        {"replica": 0, "replica_state": "serving", "error": "no answer within 0.01 s"},
        {"replica": 1, "replica_state": "dead", "error": "killed"},
    ]


def test_loads_of_experts_are_added_up_by_layer() -> None:
    several = [
        SchedulerStats(experts=[ExpertBalance(1, 100, 0.5), ExpertBalance(3, 10, 1.0)]),
        SchedulerStats(),
        SchedulerStats(experts=[ExpertBalance(1, 300, 0.9), ExpertBalance(3, 10, 0.5)]),
    ]
    found = {one.layer: (one.tokens, one.balancedness) for one in total_stats(several).experts}
    assert found == {1: (400, pytest.approx(0.8)), 3: (20, pytest.approx(0.75))}


async def test_all_replicas_record_a_profile_or_none(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    assert await client.call(StartProfile("a", None)) == ["a/replica-0", "a/replica-1"]
    assert await client.call(StopProfile()) == ["a/replica-0", "a/replica-1"]
    two.engine(1).profile_error = ParameterError("a profile is already being recorded", param="output_dir")
    with pytest.raises(ParameterError, match=r"^replica 1: a profile is already being recorded; no") as seen:
        await client.call(StartProfile("b", 3))
    assert seen.value.param == "output_dir"
    assert [two.engine(index).profiles for index in (0, 1)] == [[], []]


async def test_profiles_of_only_some_replicas_are_reported(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    await client.call(StartProfile("a", None))
    two.engine(0).profiles.clear()  # as after a restart
    with pytest.raises(ParameterError, match=r"^replica 0: no profile is being recorded; others wrote a/replica-1$"):
        await client.call(StopProfile())
    assert two.engine(1).profiles == []
    two.engine(0).profile_error = EngineDeadError("killed")
    with pytest.raises(ReplicaLostError, match=r"^replica 0: killed"):
        await client.call(StartProfile("b", None))
    assert two.engine(1).profiles == []


async def test_a_profile_needs_a_replica(two: ScriptedReplicas, client: AsyncEngineClient) -> None:
    for index in (0, 1):
        two.engine(index).die()
    for attempt in (client.call(StartProfile("a", None)), client.call(StopProfile())):
        with pytest.raises(ReplicaLostError, match="no replica is serving"):
            await attempt
