"""Remote servers as replicas: a client gets the same answers through the router as from the server."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import MODEL_INFO, ByteDecoder, ByteTokenizer, load_echo, load_fake_model
from helpers.tokenized import tokenized
from starlette.datastructures import Headers

from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.launch import launch_link
from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.types import EngineClient, GenerateInput, Origin, SessionTurnInput
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError
from sglang_jax.sampling import GenerationDefaults, SamplingParams
from sglang_jax.sampling.grammar import Grammar, GrammarKind, choice_grammar, json_grammar, tag_grammar
from sglang_jax.sampling.wants import TokenScores
from sglang_jax.scheduler.messages import SessionTurn
from sglang_jax.server import remote_link
from sglang_jax.server.callers import Caller
from sglang_jax.server.native_schema import GenerateBody, native_request
from sglang_jax.server.remote_format import request_body, request_headers
from sglang_jax.server.remote_link import RemoteLink
from sglang_jax.server.remote_replicas import connect_engines, read_addresses


async def connect(config: ServerConfig) -> EngineClient:
    return await connect_engines(config, ByteTokenizer())


@pytest.fixture(scope="module")
def behind() -> Iterator[EchoServer]:
    """A server that is a replica of a router."""
    with serve_echo(served_model_name="echo-model") as server:
        yield server


@pytest.fixture(scope="module")
def router(behind: EchoServer) -> Iterator[EchoServer]:
    with serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}", served_model_name="echo-model") as server:
        yield server


@pytest.fixture(scope="module")
def slow_pair() -> Iterator[tuple[EchoServer, EchoServer]]:
    """A slow server, and a router in front of it."""
    with (
        serve_echo(model_path="echo:0.02") as behind,
        serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}") as router,
    ):
        yield behind, router


GENERATE: list[dict[str, Any]] = [
    {"text": "Hello"},
    {"input_ids": list(b"Hello"), "sampling_params": {"max_new_tokens": 3}},
    {"text": "one, two", "sampling_params": {"stop": ","}},
    {"text": "one, two", "sampling_params": {"stop": ["x", ","], "no_stop_trim": True}},
    {"text": "one, two", "sampling_params": {"stop_token_ids": [ord(",")]}},
    {"text": "héllo 東京", "sampling_params": {"n": 3, "seed": 5}},
    {"text": ["one", "three"], "sampling_params": {"n": 2, "ignore_eos": True, "max_new_tokens": 9}},
    {"text": "abc", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    {"text": "abc", "return_logprob": True, "logprob_start_len": 1, "return_text_in_logprobs": True},
    {"text": "abc", "return_logprob": True, "top_logprobs_num": 3, "sampling_params": {"n": 2}},
    {"text": ["abc", "d"], "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}},
    {"text": "abc", "sampling_params": {"max_new_tokens": 0, "n": 2, "stop": "x"}},
    {"text": "ab<", "sampling_params": {"skip_special_tokens": False}, "extra_key": "k", "priority": 3},
]


def without_changing_fields(answer: Any) -> Any:
    """Removes the fields that differ from call to call."""
    if isinstance(answer, list):
        return [without_changing_fields(one) for one in answer]
    answer = json.loads(json.dumps(answer))
    for meta in [answer.get("meta_info", {})]:
        for name in ("e2e_latency", "id", "queue_time", "sampled_ago"):
            meta.pop(name, None)
    for name in ("id", "created"):
        answer.pop(name, None)
    return answer


@pytest.mark.parametrize("body", GENERATE, ids=range(len(GENERATE)))
def test_generate_through_the_router(behind: EchoServer, router: EchoServer, body: dict[str, Any]) -> None:
    answers = [server.http.post("/generate", json=body).json() for server in (behind, router)]
    assert "error" not in answers[0]
    assert without_changing_fields(answers[1]) == without_changing_fields(answers[0])


@pytest.mark.parametrize("body", GENERATE, ids=range(len(GENERATE)))
def test_streams_through_the_router_end_the_same(behind: EchoServer, router: EchoServer, body: dict[str, Any]) -> None:
    ends = []
    for server in (behind, router):
        last: dict[int, Any] = {}
        for event in server.events("/generate", body):
            last[event.get("index", 0)] = without_changing_fields(event)
        ends.append(last)
    assert ends[1] == ends[0]


def figures(server: EchoServer) -> dict[str, float]:
    """Sums and counts of the server's latency metrics."""
    found = re.findall(r"^sglang:(\w+_(?:sum|count))\{[^}]*\} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_a_router_reports_latencies_of_unstreamed_answers() -> None:
    """The router does not see their tokens arrive: the replica reports when it sampled them."""
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "n": 2}
    with (
        serve_echo(load_fake_model) as behind,
        serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}") as router,
    ):
        answers = router.http.post("/generate", json={"input_ids": [1, 2, 3], "sampling_params": sampling}).json()
        through, there = figures(router), figures(behind)
    names = ("time_to_first_token", "queue_time", "inter_token_latency")
    assert [through[f"{name}_seconds_count"] for name in names] == [2, 2, 2 * 7]
    for name in ("queue_time", "inter_token_latency"):
        assert through[f"{name}_seconds_sum"] == pytest.approx(there[f"{name}_seconds_sum"])
    assert there["time_to_first_token_seconds_sum"] < through["time_to_first_token_seconds_sum"]
    whole = through["time_to_first_token_seconds_sum"] + through["inter_token_latency_seconds_sum"]
    assert whole <= through["e2e_request_latency_seconds_sum"]
    for meta in (answer["meta_info"] for answer in answers):
        first, last = meta["sampled_ago"]
        assert 0 <= last <= first <= meta["e2e_latency"]


def test_engine_times_are_reported_to_operators_only() -> None:
    with serve_echo(load_fake_model, api_key="client's", admin_api_key="operator's") as server:
        for key, told in (("client's", set()), ("operator's", {"queue_time", "sampled_ago"})):
            headers = {"Authorization": f"Bearer {key}"}
            meta = server.http.post("/generate", json={"input_ids": [1]}, headers=headers).json()["meta_info"]
            assert meta.keys() & {"queue_time", "sampled_ago"} == told


OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "logprobs": 2, "echo": True, "max_tokens": 9}),
    ("/v1/completions", {"prompt": ["abc", "defg"], "n": 2, "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["abc", "defg"], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c d"}], "stop": ["c"]}),
]


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_openai_routes_through_the_router(
    behind: EchoServer, router: EchoServer, path: str, body: dict[str, Any]
) -> None:
    answers = [server.http.post(path, json=body).json() for server in (behind, router)]
    assert "error" not in answers[0]
    assert without_changing_fields(answers[1]) == without_changing_fields(answers[0])
    joined = []
    for server in (behind, router):
        texts: dict[int, list[Any]] = {}
        for event in server.events(path, body):
            for choice in event["choices"]:
                said = choice.get("text") or choice.get("delta", {}).get("content") or ""
                before = texts.setdefault(choice["index"], ["", None, []])
                before[0] += said
                before[1] = choice["finish_reason"] or before[1]
                before[2].append(choice.get("matched_stop"))
        joined.append({index: (text, reason, matched[-1]) for index, (text, reason, matched) in texts.items()})
    assert joined[1] == joined[0]


def test_the_engine_receives_the_same_parameters(behind: EchoServer, router: EchoServer) -> None:
    fields = {"max_new_tokens": 7, "seed": 11, "stop": ["zzz"], "logit_bias": {"5": 1.5}}
    seen = []
    for server in (behind, router):
        body = {"text": "abc", "sampling_params": fields, "extra_key": "salt", "priority": 2}
        assert server.http.post("/generate", json=body).status_code == 200
        last = dict(behind.seen()[-1])
        del last["id"], last["flow"]
        seen.append(last)
    assert seen[1] == seen[0]


def test_an_answer_without_a_limit_may_use_the_rest_of_the_context(behind: EchoServer, router: EchoServer) -> None:
    for server in (behind, router):
        answer = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 200
    first, second = behind.seen()[-2:]
    assert first["max_new_tokens"] == second["max_new_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_pass_the_router(behind: EchoServer, router: EchoServer, stream: bool) -> None:
    body = {"input_ids": [259, 1], "stream": stream}
    answers = [server.http.post("/generate", json=body) for server in (behind, router)]
    assert answers[0].status_code == answers[1].status_code == 500
    assert answers[1].json() == answers[0].json()
    assert answers[1].json()["error"]["code"] == "kv_capacity_exceeded"


def test_the_router_itself_refuses_bad_bodies(behind: EchoServer, router: EchoServer) -> None:
    seen = len(behind.seen())
    for body in ({"text": ""}, {"input_ids": [99999]}, {"text": "a", "sampling_params": {"temperature": -1}}):
        answers = [server.http.post("/generate", json=body) for server in (behind, router)]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[1].json() == answers[0].json()
    assert len(behind.seen()) == seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_router_ends_the_replicas_request(
    slow_pair: tuple[EchoServer, EchoServer], stream: bool
) -> None:
    behind, router = slow_pair
    aborted = len(behind.aborted())
    body = {"text": "a" * 2000, "sampling_params": {"max_new_tokens": 2000}, "stream": stream}
    connection = router.send("/generate", body)
    wait_for(lambda: behind.running() == 1)
    connection.close()
    wait_for(lambda: behind.running() == 0)
    assert len(behind.aborted()) == aborted + 1
    wait_for(lambda: not router.context.in_flight)


def test_abort_reaches_the_replicas(slow_pair: tuple[EchoServer, EchoServer]) -> None:
    behind, router = slow_pair
    body = {"text": "a" * 2000, "sampling_params": {"max_new_tokens": 2000}, "rid": "mine", "stream": True}
    with router.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert router.http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-1]["meta_info"]["completion_tokens"] > 0
    assert behind.running() == 0


def test_metrics_flush_and_state_of_replicas(behind: EchoServer, router: EchoServer) -> None:
    assert router.http.post("/flush_cache").status_code == 200
    (load,) = router.http.get("/v1/loads").json()["loads"]
    assert (load["state"], load["address"]) == ("serving", f"127.0.0.1:{behind.port}")
    assert load["max_running_requests"] == behind.engine.loads()[0].max_running_requests
    (state,) = router.http.get("/server_info").json()["internal_states"]
    assert state["pid"] == behind.state()["pid"]
    assert 'sglang:engine_alive{dp_rank="0",model_name="echo-model"} 1.0' in router.http.get("/metrics").text
    refused = router.http.post("/drain_replica", json={"replica": 0})
    assert refused.status_code == 400
    assert "separate servers" in refused.json()["error"]["message"]


def test_a_lost_server_is_removed_and_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_link, "HEALTH_SECONDS", 0.05)
    with serve_echo() as first:
        with serve_echo() as second:
            addresses = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
            router_of = serve_echo(launch=connect, connect=addresses, load_balance_method="round_robin")
            router = router_of.__enter__()
            try:
                for _ in range(4):
                    assert router.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
                assert (len(first.seen()), len(second.seen())) == (2, 2)
                second.context.draining = True  # as after a first SIGTERM: it refuses new requests
                for _ in range(4):
                    assert router.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
                assert (len(first.seen()), len(second.seen())) == (6, 2)
                wait_for(lambda: router.engine.loads()[1].state.value in ("dead", "starting"))
                second.context.draining = False
                wait_for(lambda: router.engine.loads()[1].state.value == "serving", 20)
                assert router.engine.loads()[1].restarts == 1
            except BaseException:
                router_of.__exit__(None, None, None)
                raise
        try:
            for _ in range(3):  # the second is gone, and its connections with it
                assert router.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
            assert router.http.get("/health").status_code == 200
        finally:
            router_of.__exit__(None, None, None)


EVENT = {
    "text": "a",
    "output_ids": [97],
    "meta_info": {"finish_reason": None, "prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0},
}


@pytest.mark.parametrize("begun", [True, False])
async def test_a_broken_connection_reports_whether_any_output_arrived(begun: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        if begun:
            event = f"data: {json.dumps(EVENT)}\n\n".encode()
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        link = RemoteLink(address, httpx2.AsyncClient(base_url=f"http://{address}"), MODEL_INFO)
        outputs = RequestOutputs(tokenized(GenerateInput(prompt=[1], stream=True)))
        text = OutputText(ByteDecoder(), (), frozenset())
        outputs.completions = [Completion(outputs, index=0, prompt_tokens=1, text=text)]
        link.submit(outputs)
        async with asyncio.timeout(20):
            if begun:
                assert [delta.text for delta in await outputs.take()] == ["a"]
            with pytest.raises(EngineDeadError, match=r"the connection to .* broke") as broke:
                await outputs.take()
        assert broke.value.started is (True if begun else None)
        link.release(outputs)
        await link.close()


def config(**options: Any) -> ServerConfig:
    return ServerConfig(model_path="echo", **options)


async def test_an_address_without_a_server_is_an_error() -> None:
    with pytest.raises(EngineDeadError, match=r"127\.0\.0\.1:9 does not answer"):
        await connect(config(connect="127.0.0.1:9"))


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"\xff", b"[" * 100_000, b'{"loads": [{"state": "serving"}]}'])
@pytest.mark.parametrize("path", ["/model_info", "/tokenize", "/v1/loads"])
async def test_another_server_at_the_address_is_a_lost_replica(
    behind: EchoServer, monkeypatch: pytest.MonkeyPatch, path: str, content: bytes
) -> None:
    """A replica behind a proxy that answers everything itself: it does not start, or is lost after missed polls."""
    broken = {path}

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path in broken:
            return httpx2.Response(200, content=content)
        kind = {"content-type": "application/json"}
        found = behind.http.request(request.method, request.url.path, content=request.content, headers=kind)
        return httpx2.Response(found.status_code, content=found.content)

    client = functools.partial(httpx2.AsyncClient, transport=httpx2.MockTransport(answer))
    monkeypatch.setattr(remote_link, "HEALTH_SECONDS", 0.001)
    monkeypatch.setattr(remote_link.httpx2, "AsyncClient", client)
    with pytest.raises(EngineDeadError, match="sent an invalid response"):
        await RemoteLink.connect("a:1", ByteTokenizer(), None)
    broken.clear()
    link = await RemoteLink.connect("a:1", ByteTokenizer(), None)
    try:
        broken.add("/v1/loads")
        assert "sent an invalid response" in await asyncio.wait_for(link.ended(), 10)
    finally:
        await link.close()


async def test_a_replica_with_another_tokenizer_is_refused(behind: EchoServer) -> None:
    class Other(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [*super().encode(text), 256]

    with pytest.raises(ConfigError, match="tokenizes text differently: --model-path"):
        await connect_engines(config(connect=f"127.0.0.1:{behind.port}"), Other())


async def test_the_router_sends_the_replicas_key() -> None:
    def serve() -> Any:
        return serve_echo(api_key="secret")

    with serve() as behind:
        address = f"127.0.0.1:{behind.port}"
        with pytest.raises(EngineDeadError, match="returned status 401 for /model_info"):
            await connect(config(connect=address))
        client = await connect(config(connect=address, api_key="secret"))
        assert client.alive
        await client.close()
        assert not client.alive


async def test_the_router_needs_an_operators_key(tmp_path: Path) -> None:
    """Their control routes are not open to every client."""
    key = tmp_path / "key"
    key.write_text("operator's\n")
    with serve_echo(api_key="client's", admin_api_key="operator's") as behind:
        address = f"127.0.0.1:{behind.port}"
        with pytest.raises(EngineDeadError, match="403"):
            await connect(config(connect=address, api_key="client's"))
        client = await connect(config(connect=address, api_key="mine", admin_api_key_file=key))
        assert client.alive
        await client.close()


def test_a_router_forwards_the_tenant_of_requests(tmp_path: Path) -> None:
    """So that keys take turns in the replica's queue. Only an operator's header is trusted."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": {name: {"key": f"{name}'s"} for name in ("one", "other")}}))
    with (
        serve_echo(api_key="client's", admin_api_key="operator's") as behind,
        serve_echo(
            launch=connect, connect=f"127.0.0.1:{behind.port}", admin_api_key="operator's", api_keys=keys
        ) as router,
    ):

        def tenant(server: EchoServer, key: str, **headers: str) -> str:
            headers["Authorization"] = f"Bearer {key}"
            for stream in (False, True):
                body = {"text": "abc", "stream": stream}
                assert server.http.post("/generate", json=body, headers=headers).status_code == 200
            last, before = (one["tenant"] for one in behind.seen()[-2:])
            assert last == before
            return str(last)

        assert [tenant(router, "one's"), tenant(router, "other's")] == ["one", "other"]
        assert tenant(behind, "client's", **{"X-Tenant": "one"}) == "api_key"
        assert tenant(behind, "operator's", **{"X-Tenant": "o%20ne"}) == "o ne"
        assert tenant(behind, "operator's") == "admin_api_key"
        for key, believed in (("client's", False), ("operator's", True)):
            tenant(behind, key, **{"X-Background": "1"})
            assert behind.seen()[-1]["background"] is believed
        batch = {"text": ["abc", "abd"], "rid": ["p", "q"], "sampling_params": {"n": 2}}
        for server, key in ((router, "one's"), (router, "other's"), (behind, "client's")):
            answer = server.http.post("/generate", json=batch, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
            flows = [one["flow"] for one in behind.seen()[-4:]]
            assert len(set(flows)) == 1, "prompts and completions of one request have one turn"
            assert flows[0] != behind.seen()[-5]["flow"], "and no other's"
        told = {"Authorization": "Bearer client's", "X-Client-Request": flows[0]}
        assert behind.http.post("/generate", json=batch, headers=told).status_code == 200
        assert behind.seen()[-1]["flow"] != flows[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got '' in it"),
        ("host", "got 'host' in it"),
        ("a:1,b:x", "got 'b:x' in it"),
        ("a:70000", "got 'a:70000' in it"),
        ("a:1,a:1", "names a server twice"),
        ("local,a:1,local", "names a server twice"),
        ("local", "has no other server: local"),
    ],
)
def test_malformed_addresses_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_addresses(text)


def test_a_list_of_addresses_is_parsed() -> None:
    assert read_addresses("a:1, b.example:2,[::1]:3") == (["a:1", "b.example:2", "[::1]:3"], False)
    assert read_addresses("a:1,local") == (["a:1"], True)


async def test_conflicting_options_of_local_and_remote_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match="without local in the list dp_size too, got nnodes 1 and dp_size 2"):
        await connect(config(connect="a:1", dp_size=2))
    with pytest.raises(ConfigError, match=r"nnodes must be 1, and .* got nnodes 2 and dp_size 1"):
        await connect(config(connect="a:1,local", nnodes=2, dist_init_addr="a:2"))


async def launch_local(config: EngineConfig, placement: Placement | None) -> CoreLink:
    return await launch_link(config, in_process=False, load=load_echo, placement=placement)


async def connect_alongside(config: ServerConfig) -> EngineClient:
    return await connect_engines(config, ByteTokenizer(), launch_local)


def test_local_engines_alongside_a_remote_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the requests. The remote server may be absent at the start and joins once it is found; the server
    drains only its own engines."""
    monkeypatch.setattr(remote_link, "HEALTH_SECONDS", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    connected = serve_echo(launch=connect_alongside, connect=f"{address},local", load_balance_method="round_robin")
    with connected as router:
        own, other = router.engine.loads()
        assert (own.state.value, own.address, other.address) == ("serving", "", address)
        assert other.state.value != "serving"
        assert router.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
        with serve_echo(port=int(address.split(":")[1])) as behind:
            wait_for(lambda: router.engine.loads()[1].state.value == "serving", 20)
            for _ in range(4):
                assert router.http.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
            assert len(behind.seen()) == 2
            assert "separate servers" in router.http.post("/drain_replica", json={}).text
            assert router.http.post("/drain_replica", json={"replica": 0}).status_code == 200
            assert router.engine.loads()[0].restarts == 1


async def test_local_engines_that_fail_end_the_start(behind: EchoServer) -> None:
    async def fail(config: EngineConfig, placement: Placement | None) -> CoreLink:
        raise CheckpointError("no such model")

    with pytest.raises(CheckpointError, match="no such model"):
        await connect_engines(config(connect=f"local,127.0.0.1:{behind.port}"), ByteTokenizer(), fail)


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={5: 1.5, 7: -2.0},
        stop=("a", "bc"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        seed=2**62 + 1,
        n=3,
        skip_special_tokens=False,
        include_stop=True,
        grammar=json_grammar({"type": "object"}, "json_schema"),
    ),
]
GRAMMARS = [
    Grammar(GrammarKind.REGEX, "a|b", "regex"),
    Grammar(GrammarKind.EBNF, 'start: "ä"', "ebnf"),
    choice_grammar(["yes", "no"], "guided_choice"),
    tag_grammar({"format": {"type": "any_text"}}, "structural_tag"),
]


@pytest.mark.parametrize("sampling", [*SAMPLINGS, *(SamplingParams(grammar=grammar) for grammar in GRAMMARS)])
def test_a_request_arrives_as_it_was_sent(sampling: SamplingParams) -> None:
    """Independent of the defaults of the other server."""
    sent = GenerateInput(
        prompt=[1, 2, 3],
        sampling=sampling,
        request_id="x",
        stream=True,
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=4,
        extra_key="salt",
        priority=-3,
        routing_key="key",
        markers=frozenset({7, 9}),
        continues_text=False,
        session=SessionTurnInput("s", after="r", name="x", opening=7, whole=True),
        shared_len=2,
        wants=TokenScores((3, 1)),
    )
    plain = GenerateInput(prompt=[])
    defaults = [one.name for one in dataclasses.fields(sent) if getattr(sent, one.name) == getattr(plain, one.name)]
    assert set(defaults) <= {"sampling", "progress"}, "each field has another value than its default"
    origin = Origin("Ärger & Söhne", "gen-\u00e4", background=True)
    turn = SessionTurn("s", origin.tenant, "x", after="r", bos=7, whole=True)
    request = tokenized(sent, origin, session=turn)
    body = json.loads(json.dumps(request_body(request, "x", 100)))
    headers = Headers(request_headers(request))
    others = GenerationDefaults(temperature=0.3, top_p=0.2, top_k=3, min_p=0.5, repetition_penalty=2.0)
    call = native_request(GenerateBody(**body), others, headers, lambda *_: None)
    assert Caller("router", admin=True).origin("mine", call.claim) == origin
    (arrived,) = call.prompts
    sampling = dataclasses.replace(arrived.sampling, stop_token_ids=tuple(arrived.sampling.stop_token_ids))
    assert dataclasses.replace(arrived, sampling=sampling) == sent


def test_every_sampling_field_is_covered() -> None:
    for field in dataclasses.fields(SamplingParams):
        assert len({str(vars_of(one)[field.name]) for one in SAMPLINGS}) == 2, field.name


def vars_of(sampling: SamplingParams) -> dict[str, Any]:
    return {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
