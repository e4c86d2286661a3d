"""The server over replicas: routing keys, loads, metrics, drains and lost replicas."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import MAX_RUNNING, EchoCore, load_echo, load_tokenizer
from helpers.replica_fakes import AT_ONCE

from sglang_jax.config import ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import launch_link
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.replica import Replica
from sglang_jax.engine.router import Router
from sglang_jax.engine.types import ReplicaState
from sglang_jax.scheduler.commands import GetState


async def launch_two(config: ServerConfig, load: CoreLoader = load_echo) -> AsyncEngineClient:
    """Two echo engines in threads of this process."""

    async def start() -> CoreLink:
        return await launch_link(config, in_process=True, load=load)

    replicas = [Replica(index, start, backoff=AT_ONCE) for index in range(2)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    return replicated_client(config, replicas, load_tokenizer(config))


@pytest.fixture(scope="module")
def pair() -> Iterator[EchoServer]:
    with serve_echo(launch=launch_two, served_model_name="echo-model", load_balance_method="round_robin") as server:
        yield server


@pytest.fixture
def slow_pair() -> Iterator[EchoServer]:
    with serve_echo(launch=launch_two, model_path="echo:0.02", load_balance_method="least_loaded") as server:
        yield server


class HoldingEcho(EchoCore):
    """Holds back the last token of each request until `let_go`, so that tests can see requests running."""

    let_go = threading.Event()

    def _step(self) -> None:
        held = {}
        if not self.let_go.is_set():
            held = {
                wire_id: one
                for wire_id, one in self._requests.items()
                if len(one.output) + 1 == one.message.sampling.max_new_tokens
            }
        self._requests = {wire_id: one for wire_id, one in self._requests.items() if wire_id not in held}
        super()._step()
        self._requests |= held


@pytest.fixture
def holding_pair() -> Iterator[EchoServer]:
    HoldingEcho.let_go.clear()

    async def launch(config: ServerConfig) -> AsyncEngineClient:
        return await launch_two(config, HoldingEcho)

    with serve_echo(launch=launch, model_path="echo:0.005", load_balance_method="least_loaded") as server:
        yield server


def started(server: EchoServer) -> int:
    """The number of running requests, all past their first step: the count arrives after the outputs of those steps."""
    return sum(int(str(state.get("started", 0))) for state in server.await_(server.engine.call(GetState())))


def seen(server: EchoServer) -> list[int]:
    """The number of requests per replica."""
    return [len(json.loads(str(state.get("seen", "[]")))) for state in server.await_(server.engine.call(GetState()))]


def router(server: EchoServer) -> Router:
    assert isinstance(server.engine, AsyncEngineClient)
    assert isinstance(server.engine.links, Router)
    return server.engine.links


def lose(server: EchoServer, index: int) -> None:
    """Acts as if the replica's process had been killed."""
    link = router(server).replicas[index].client
    assert isinstance(link, CoreLink)
    server.loop.call_soon_threadsafe(link._lose, "the engine process was killed by SIGKILL")


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "abc"}),
    ("/v1/completions", {"prompt": "abc"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_routing_key_in_a_field_or_header_picks_one_replica(
    pair: EchoServer, path: str, body: dict[str, Any]
) -> None:
    homes = set()
    for key in "abcdefgh":
        before = seen(pair)
        calls: list[tuple[dict[str, Any], dict[str, str]]] = [
            ({"routing_key": key}, {}),
            ({}, {"X-Routing-Key": key}),
            ({}, {"X-SMG-Routing-Key": key}),
            ({"routing_key": key}, {"X-Routing-Key": "another"}),
        ]
        for fields, headers in calls:
            assert pair.http.post(path, json={**body, **fields}, headers=headers).status_code == 200
        after = seen(pair)
        assert sorted(new - old for old, new in zip(before, after, strict=True)) == [0, 4]
        homes.add(after[0] > before[0])
    assert homes == {True, False}


def test_prompts_of_a_batch_may_have_separate_routing_keys(pair: EchoServer) -> None:
    before = seen(pair)
    body = {"text": ["x"] * 8, "routing_key": list("abcdefgh")}
    assert pair.http.post("/generate", json=body).status_code == 200
    assert all(new > old for old, new in zip(before, seen(pair), strict=True))
    wrong = pair.http.post("/generate", json={"text": ["x"] * 2, "routing_key": ["a"]})
    assert "routing_key holds 1 values for 2 prompts" in wrong.json()["error"]["message"]


def test_loads_have_sglangs_format(pair: EchoServer) -> None:
    answer = pair.http.get("/v1/loads").json()
    assert answer["dp_rank_count"] == 2
    assert [load["dp_rank"] for load in answer["loads"]] == [0, 1]
    assert {load["state"] for load in answer["loads"]} == {"serving"}
    assert {load["max_running_requests"] for load in answer["loads"]} == {MAX_RUNNING}
    assert set(answer["aggregate"]) == {
        "total_running_reqs",
        "total_waiting_reqs",
        "total_reqs",
        "avg_token_usage",
        "avg_throughput",
        "avg_utilization",
    }


def test_loads_of_a_server_without_replicas(server: EchoServer) -> None:
    answer = server.http.get("/v1/loads").json()
    (load,) = answer["loads"]
    assert (load["dp_rank"], load["state"], load["restarts"], load["address"]) == (0, "serving", 0, "")
    assert server.http.post("/generate", json={"text": "a", "routing_key": "k"}).json()["text"] == "a"
    refused = server.http.post("/drain_replica", json={})
    assert refused.status_code == 400
    assert "needs dp_size 2 or more" in refused.json()["error"]["message"]
    assert "dp_rank" not in server.http.get("/metrics").text


def test_loads_count_running_requests(slow_pair: EchoServer) -> None:
    body = {"text": "a" * 2000, "sampling_params": {"n": 3, "max_new_tokens": 2000}, "stream": True}
    with slow_pair.http.stream("POST", "/generate", json=body):
        loads = slow_pair.http.get("/v1/loads").json()["loads"]
        assert sorted(load["in_flight"] for load in loads) == [0, 3]
    wait_for(lambda: all(load.in_flight == 0 for load in slow_pair.engine.loads()))


def test_metrics_of_each_replica(pair: EchoServer) -> None:
    text = pair.http.get("/metrics").text
    for index in (0, 1):
        for name in ("num_running_reqs", "cache_hit_rate", "engine_alive", "prompt_tokens_total"):
            assert re.search(rf'^sglang:{name}{{dp_rank="{index}",model_name="echo-model"}} ', text, re.MULTILINE)
    assert text.count("# TYPE sglang:num_running_reqs gauge") == 1
    assert re.search(r'^sglang:num_requests_total{model_name="echo-model"} ', text, re.MULTILINE)


def test_server_info_has_every_replica(pair: EchoServer) -> None:
    states = pair.http.get("/server_info").json()["internal_states"]
    assert [(state["replica"], state["replica_state"]) for state in states] == [(0, "serving"), (1, "serving")]


def test_requests_of_a_lost_replica_fail_with_an_error_event_or_503(holding_pair: EchoServer) -> None:
    pair = holding_pair
    body = {"text": "a" * 100, "sampling_params": {"max_new_tokens": 100}}
    endless = {"text": "a" * 2000, "sampling_params": {"max_new_tokens": 2000}, "stream": True}
    with ThreadPoolExecutor() as threads:
        with pair.http.stream("POST", "/generate", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            (home,) = [load.index for load in pair.engine.loads() if load.in_flight]
            other = threads.submit(pair.http.post, "/generate", json=body)
            wait_for(lambda: pair.engine.loads()[1 - home].in_flight == 1)
            same = threads.submit(pair.http.post, "/generate", json=body)
            wait_for(lambda: sum(load.in_flight for load in pair.engine.loads()) == 3)
            wait_for(lambda: started(pair) == 3)
            crowded = next(load.index for load in pair.engine.loads() if load.in_flight == 2)
            lose(pair, home)
            HoldingEcho.let_go.set()
            events = [line for line in lines if line]
            error = json.loads(events[-1].removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == ("replica_lost", "service_unavailable")
            assert f"replica {home} was lost" in error["message"]
        answers = [other.result(), same.result()]
    lost = [answer for answer in answers if answer.status_code == 503]
    assert len(lost) == (1 if crowded == home else 0)
    assert all(answer.json()["error"]["code"] == "replica_lost" for answer in lost)
    assert all(answer.headers["retry-after"] == "1" for answer in lost)
    assert all(answer.json()["text"] == "a" * 100 for answer in answers if answer not in lost)
    wait_for(lambda: pair.engine.loads()[home].state is ReplicaState.SERVING)
    load = pair.http.get("/v1/loads").json()["loads"][home]
    assert (load["restarts"], load["last_end"]) == (
        1,
        "the engine is lost: the engine process was killed by SIGKILL",
    )
    assert pair.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"


def test_a_rolling_drain_under_load_refuses_no_request(slow_pair: EchoServer) -> None:
    with ThreadPoolExecutor(9) as threads:
        drain = threads.submit(slow_pair.http.post, "/drain_replica", json={})
        answers = []
        while not drain.done():
            calls = [threads.submit(slow_pair.http.post, "/generate", json={"text": "abcdef"}) for _ in range(8)]
            answers += [call.result() for call in calls]
    assert drain.result().json() == {"success": True}
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["text"] for answer in answers} == {"abcdef"}
    loads = slow_pair.http.get("/v1/loads").json()["loads"]
    assert [(load["restarts"], load["last_end"]) for load in loads] == [(1, ""), (1, "")]
    assert slow_pair.http.post("/drain_replica", json={"replica": 1}).status_code == 200
    assert [load.restarts for load in slow_pair.engine.loads()] == [1, 2]
    wrong = slow_pair.http.post("/drain_replica", json={"replica": 2})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "replica")


def test_health_while_no_replica_serves(slow_pair: EchoServer) -> None:
    gate = asyncio.Event()

    async def held() -> CoreLink:
        await gate.wait()
        raise AssertionError("never let in")

    for index in (0, 1):
        router(slow_pair).replicas[index]._start = held
        lose(slow_pair, index)
    wait_for(lambda: not slow_pair.engine.alive)
    answer = slow_pair.http.get("/health")
    assert answer.status_code == 503
    assert re.match("no replica serves: 0 is .*, 1 is ", answer.json()["error"]["message"])
