"""Health, information, control, tokenizer and metrics."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import CONTEXT_LENGTH, EOS, VOCAB_SIZE, load_fake_model
from helpers.stepped_core import Steps, load_stepped
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.types import ASGIApp, Message

from sglang_jax.about import version
from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import ReplicaLoad, ReplicaState
from sglang_jax.scheduler.messages import ExpertBalance, GroupUsage, SchedulerStats
from sglang_jax.server import management
from sglang_jax.server.app import create_app
from sglang_jax.server.callers import Callers
from sglang_jax.server.local_hosts import LocalHosts
from sglang_jax.server.metrics import LATENCY_BUCKETS, LatencyHistogram, SchedulerCollector
from sglang_jax.server.serve import http_config

LONG = {"text": "a" * 1000, "sampling_params": {"max_new_tokens": 1000}}


def test_health(server: EchoServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/readyz").json() == {"status": "ok", "programs_left": 0}
    before = len(server.seen())
    assert server.http.get("/health_generate").status_code == 200
    assert [request["max_new_tokens"] for request in server.seen()[before:]] == [1]


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(server: EchoServer, path: str) -> None:
    info = server.http.get(path).json()
    assert info["model_path"] == "echo"
    assert info["served_model_name"] == "echo-model"
    assert info["is_generation"] is True
    assert (info["vocab_size"], info["context_length"], info["eos_token_ids"]) == (VOCAB_SIZE, CONTEXT_LENGTH, [EOS])


def test_the_root_route_describes_the_server(server: EchoServer) -> None:
    told = server.http.get("/").json()
    assert told["model"] == "echo-model"
    for name in ("routes", "ready"):
        method, path = told[name].split()
        assert server.http.request(method, path).status_code == 200


def test_version_and_load(slow_server: EchoServer) -> None:
    http = slow_server.http
    assert http.get("/version").json() == {"version": version()}
    assert http.get("/load").json() == {"server_load": 0}
    with http.stream("POST", "/generate", json={"text": "abc" * 100, "stream": True, "rid": "load"}) as stream:
        lines = stream.iter_lines()  # kept: its end would close the connection
        next(lines)
        assert http.get("/load").json() == {"server_load": 1}


def test_the_model_has_several_names() -> None:
    with serve_echo(served_model_name=["one", "two/three"]) as server:
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["one", "two/three"]
        assert server.http.get("/v1/models/two/three").json()["id"] == "two/three"
        for name in ("one", "two/three", "default"):
            answer = server.http.post("/v1/completions", json={"prompt": "a", "model": name})
            assert answer.json()["model"] == "one"
        refused = server.http.post("/v1/completions", json={"prompt": "a", "model": "echo"})
        assert refused.status_code == 404
        assert "this server serves 'one', 'two/three'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(server: EchoServer, path: str) -> None:
    info = server.http.get(path).json()
    assert (info["model_path"], info["page_size"], info["schedule_policy"]) == ("echo", 16, "fcfs")
    assert info["internal_states"][0]["running"] == 0
    assert re.fullmatch(r"\d+\.\d+.*", info["version"])
    assert "api_key" not in info


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
def test_flush_cache(slow_server: EchoServer, method: str, path: str) -> None:
    assert slow_server.http.request(method, path).json()["success"] is True
    connection = slow_server.send("/generate", LONG)
    wait_for(lambda: slow_server.running() == 1)
    busy = slow_server.http.request(method, path)
    assert (busy.status_code, busy.json()["error"]["code"]) == (400, "engine_busy")
    connection.close()
    wait_for(lambda: slow_server.running() == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {**LONG, "rid": "mine"}),
        ("/generate", {**LONG, "text": [LONG["text"]] * 2, "rid": "mine"}),
        ("/v1/completions", {"prompt": LONG["text"], "max_tokens": 1000, "rid": "mine"}),
    ],
)
def test_abort_ends_a_request_with_the_output_so_far(slow_server: EchoServer, path: str, body: dict[str, Any]) -> None:
    with slow_server.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert slow_server.http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        *_, last = [line for line in lines if line.startswith("data: {")]
    assert '"type":"abort"' in last or '"finish_reason":"abort"' in last
    assert slow_server.running() == 0


def test_abort_of_one_request_of_a_batch_and_of_all(slow_server: EchoServer) -> None:
    body = {**LONG, "text": [LONG["text"]] * 2, "rid": ["one", "two"], "stream": True}
    with slow_server.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        slow_server.http.post("/abort_request", json={"rid": "one"})
        wait_for(lambda: slow_server.running() == 1)
        slow_server.http.post("/abort_request", json={"abort_all": True})
        wait_for(lambda: slow_server.running() == 0)
        list(lines)


def test_abort_of_an_unknown_request(server: EchoServer) -> None:
    assert server.http.post("/abort_request", json={"rid": "unknown"}).status_code == 200
    refused = server.http.post("/abort_request", json={})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "rid")


def test_tokenize_and_detokenize_round_trip(server: EchoServer) -> None:
    one = server.http.post("/tokenize", json={"prompt": "a€"}).json()
    assert one == {"tokens": list("a€".encode()), "count": 4, "max_model_len": CONTEXT_LENGTH}
    assert server.http.post("/detokenize", json={"tokens": one["tokens"]}).json() == {"text": "a€", "prompt": "a€"}
    many = server.http.post("/tokenize", json={"prompt": ["a", "bc"]}).json()
    assert (many["tokens"], many["count"]) == ([[97], [98, 99]], [1, 2])
    assert server.http.post("/detokenize", json={"tokens": many["tokens"]}).json() == {"text": ["a", "bc"]}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"text": "", "prompt": ""}
    special = {"tokens": [97, EOS], "skip_special_tokens": False}
    assert server.http.post("/detokenize", json=special).json() == dict.fromkeys(("text", "prompt"), f"a<{EOS}>")


def test_the_size_of_a_tokenize_request_is_limited(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "MAX_TOKENIZED", 20_000)
    text = "a" * 10_000
    assert server.http.post("/tokenize", json={"prompt": [text] * 2}).json()["count"] == [len(text)] * 2
    refused = server.http.post("/tokenize", json={"prompt": [text, text, "a"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "prompt has more than 20000 tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokenizer_refusals(server: EchoServer, path: str, body: dict[str, Any], param: str) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def figures(text: str) -> dict[str, float]:
    """Maps a metric's name, with its `le` bound if it has one, to its value."""
    found = re.findall(r'^([\w:]+)\{(?:le="([^"]+)",)?model_name="[^"]+"\} (\S+)$', text, re.MULTILINE)
    return {name + (f"<={bound}" if bound else ""): float(value) for name, bound, value in found}


def test_metrics_of_requests() -> None:
    steps = Steps()
    with serve_echo(load_stepped(steps), model_path="echo:0.01") as server:
        with server.http.stream("POST", "/generate", json={"text": "abcd", "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    steps.allow()
        steps.allow(100)
        server.http.post("/generate", json={"text": ["a", "b"]})
        server.http.post("/generate", json={"text": ""})
        server.http.post("/generate", json={"input_ids": [EOS + 3]})
        response = server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        values = figures(response.text)
    assert values["sglang:num_requests_total"] == 3  # refused and failed requests do not count
    assert values["sglang:time_to_first_token_seconds_count"] == 1
    assert values["sglang:inter_token_latency_seconds_count"] == 4
    streamed = values["sglang:time_to_first_token_seconds_sum"] + values["sglang:inter_token_latency_seconds_sum"]
    assert 0.04 <= streamed <= values["sglang:e2e_request_latency_seconds_sum"]
    assert values["sglang:e2e_request_latency_seconds_count"] == 3
    assert values["sglang:e2e_request_latency_seconds_sum"] >= 0.05
    assert values["sglang:engine_alive"] == 1


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 3)), max_size=20))
def test_latencies_are_exposed_as_prometheus_client_does(values: list[tuple[float, int]]) -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("x", "Text.", ["model_name"], registry=theirs, buckets=LATENCY_BUCKETS).labels("m")
    mine = LatencyHistogram("x", "Text.", LATENCY_BUCKETS, "m")
    ours.register(mine)
    for seconds, count in values:
        mine.observe(seconds, count)
        for _ in range(count):
            reference.observe(seconds)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    found = generate_latest(ours).decode().splitlines()
    [expected_sum], [found_sum] = ([line for line in lines if "x_sum" in line] for lines in (expected, found))
    assert [line for line in found if line != found_sum] == [line for line in expected if line != expected_sum]
    assert float(found_sum.split()[-1]) == pytest.approx(float(expected_sum.split()[-1]))


def test_each_of_several_pools_has_a_usage_metric() -> None:
    groups = [GroupUsage("full", 10, 100), GroupUsage("swa 8", 30, 40), GroupUsage("swa 20", 4, 40, session_tokens=3)]
    groups.append(GroupUsage("mamba", 3, 5, "slot", 2))
    stats = SchedulerStats(num_used_tokens=10, max_total_tokens=100, groups=groups)
    load = ReplicaLoad(index=0, state=ReplicaState.SERVING, max_running_requests=1, max_total_tokens=100, stats=stats)
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(SimpleNamespace(loads=lambda: [load]), "m"))
    values = figures(generate_latest(registry).decode())
    assert values["sglang:full_token_usage"] == 0.1
    assert values["sglang:swa_8_token_usage"] == 0.75
    assert values["sglang:swa_20_token_usage"] == 0.1
    assert values["sglang:mamba_usage"] == 0.6
    assert values["sglang:swa_20_session_held_tokens"] == 3
    assert values["sglang:mamba_session_held_slots"] == 2
    assert values["sglang:token_usage"] == 0.75


def test_expert_balancedness_has_a_series_per_layer_and_replica() -> None:
    balances = [[ExpertBalance(0, 60, 0.5), ExpertBalance(3, 60, 0.25)], [ExpertBalance(0, 90, 1.0)], []]
    loads = [
        ReplicaLoad(
            index=index,
            state=ReplicaState.SERVING,
            max_running_requests=1,
            max_total_tokens=100,
            stats=SchedulerStats(experts=experts),
        )
        for index, experts in enumerate(balances)
    ]
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(SimpleNamespace(loads=lambda: loads), "m"))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("sglang:expert")]
    assert lines == [
        'sglang:expert_tokens_total{dp_rank="0",model_name="m"} 120.0',
        'sglang:expert_tokens_total{dp_rank="1",model_name="m"} 90.0',
        'sglang:expert_balancedness{dp_rank="0",layer="0",model_name="m"} 0.5',
        'sglang:expert_balancedness{dp_rank="0",layer="3",model_name="m"} 0.25',
        'sglang:expert_balancedness{dp_rank="1",layer="0",model_name="m"} 1.0',
    ]


def test_metrics_of_the_scheduler() -> None:
    with serve_echo(load_fake_model, max_total_tokens=512, page_size=4) as server:
        prompt = {"input_ids": list(range(1, 41)), "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        for _ in range(2):
            server.http.post("/generate", json=prompt).raise_for_status()
        wait_for(lambda: server.context.client.stats.num_finished == 2)
        stats = server.context.client.stats
        values = figures(server.http.get("/metrics").text)
    assert values["sglang:prompt_tokens_total"] == 80
    assert values["sglang:generation_tokens_total"] == 16
    assert values["sglang:cached_tokens_total"] == stats.cached_tokens == 36
    assert values["sglang:cache_hit_rate"] == pytest.approx(36 / 80)
    assert values["sglang:max_total_num_tokens"] == 512
    for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage"):
        assert values[f"sglang:{name}"] == 0
    for name in (
        "num_aborted_requests_total",
        "num_retractions_total",
        "num_evicted_pages_total",
        "num_memory_faults_total",
    ):
        assert values[f"sglang:{name}"] == 0
    assert values["sglang:gen_throughput"] >= 0


def test_the_usage_reports_cached_tokens() -> None:
    with serve_echo(load_fake_model, page_size=4) as server:
        body = {"prompt": list(range(1, 41)), "max_tokens": 2, "stream_options": {"include_usage": True}}
        for expected in (0, 36):
            usage = server.http.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
        *_, last = server.events("/v1/completions", body)
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 36}


def test_the_openapi_document_describes_the_bodies(server: EchoServer) -> None:
    schema = server.http.get("/openapi.json").json()
    for path, name in (("/generate", "GenerateBody"), ("/v1/completions", "CompletionBody")):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].endswith(name)
    assert {"prompt", "max_tokens", "logit_bias"} <= set(
        schema["components"]["schemas"]["CompletionBody"]["properties"]
    )


def test_the_page_of_routes_is_complete_and_loads_no_script() -> None:
    with serve_echo(api_key="sesame") as server:
        answer = server.http.get("/docs")
        schema = server.http.get("/openapi.json", headers={"Authorization": "Bearer sesame"}).json()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    listed = dict(re.findall(r"<tr><td><code>([A-Z]+ [^<]+)</code></td><td>([^<]+)</td></tr>", answer.text))
    assert set(listed) == {
        f"{method.upper()} {path}" for path, operations in schema["paths"].items() for method in operations
    }
    assert listed["GET /server_info"].endswith(" Operators only.")
    assert "perators only" not in listed["POST /generate"]
    assert re.findall(r'\b(?:src|href)="[^"]+"|<script|@import|url\(|sesame', answer.text) == ['href="/openapi.json"']


def test_health_without_a_body(server: EchoServer) -> None:
    response = server.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example:30000", 403),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:1", 403),
        ("localhost", 200),
        ("LOCALHOST:30000", 200),
        ("app.localhost:1", 200),
        ("127.0.0.1:5", 200),
        ("10.1.2.3", 200),
        ("[::1]:30000", 200),
        ("[::1]", 200),
        ("proxy.example", 200),
    ],
)
async def test_a_local_server_without_keys_accepts_only_local_host_names(
    server: EchoServer, host: str, status: int
) -> None:
    if host != "proxy.example":
        response = server.http.get("/health", headers={"Host": host})
        assert response.status_code == status
        if status == 403:
            assert response.json()["error"]["code"] == "host_not_allowed"
            assert host in response.json()["error"]["message"]
            assert "--allowed-hosts" in response.json()["error"]["message"]
    app = create_app(server.context)
    assert await status_by(LocalHosts(app, ["proxy.example"]), host) == status
    assert await status_by(LocalHosts(app, ["*"]), host) == 200


async def status_by(app: ASGIApp, host: str) -> int:
    """The status of the answer to a request for a host name."""
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"host", host.encode()), (b"authorization", b"Bearer k")]
    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return statuses[0]


async def test_which_servers_check_host_names(server: EchoServer) -> None:
    async def status(**options: str) -> int:
        config = ServerConfig(model_path="echo", **options)
        context = dataclasses.replace(server.context, config=config, callers=Callers.of(config))
        return await status_by(cast(ASGIApp, http_config(context).app), "evil.example")

    assert [await status(), await status(host="::1"), await status(host="localhost")] == [403, 403, 403]
    others: list[dict[str, str]] = [{"host": "0.0.0.0"}, {"api_key": "k"}, {"allowed_hosts": "a,evil.example"}]
    assert [await status(**options) for options in others] == [200, 200, 200]
