"""Sessions over HTTP, as SGLang's clients use them: over one engine, over replicas, and through a router."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from click.testing import CliRunner
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import (
    FAKE_EOS,
    FAKE_VOCAB_SIZE,
    ByteTokenizer,
    FakeModelCore,
    load_fake_model,
    load_tokenizer,
)
from helpers.replica_fakes import fake_replicas

from sglang_jax.cli.cache_report import cache_report
from sglang_jax.cli.main import run as run_command
from sglang_jax.config import EngineConfig, LoadBalanceMethod, ServerConfig
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import EngineClient
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.server.remote_replicas import connect_engines

ORACLE = Oracle(FAKE_VOCAB_SIZE)
KEYS = {
    "ann": {"key": "ann's", "share_cache": True},
    "bob": {"key": "bob's", "share_cache": True},
    "eve": {"key": "eve's", "admin": True, "share_cache": True},
}


async def one(config: ServerConfig) -> EngineClient:
    return await launch_core(config, in_process=True, load=load_fake_model, load_tokenizer=load_tokenizer)


async def three(config: ServerConfig) -> AsyncEngineClient:
    return await fake_replicas(3, LoadBalanceMethod.ROUND_ROBIN, config)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps({"keys": KEYS}))
    return file


@pytest.fixture(scope="module", params=["one engine", "three replicas", "a router"])
def server(request: pytest.FixtureRequest, keys: Path) -> Iterator[EchoServer]:
    """Real schedulers over `FakeRunner`."""
    options: dict[str, Any] = {"api_keys": keys, "page_size": 4, "max_total_tokens": 512, "max_sessions": 4}
    if request.param == "one engine":
        with serve_echo(launch=one, **options) as server:
            yield server
        return
    with serve_echo(launch=three, **options) as behind:
        if request.param == "three replicas":
            yield behind
            return

        async def connect(config: ServerConfig) -> EngineClient:
            return await connect_engines(config.model_copy(update={"api_key": "eve's"}), ByteTokenizer())

        with serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}", api_keys=keys) as server:
            yield server


def post(server: EchoServer, path: str, body: dict[str, Any], key: str = "ann's") -> httpx2.Response:
    return server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def opened(server: EchoServer, key: str = "ann's", **fields: Any) -> str:
    answer = post(server, "/open_session", {"capacity_of_str_len": 1000, "streaming": True, **fields}, key)
    assert answer.status_code == 200, answer.text
    session = answer.json()
    assert isinstance(session, str)
    return session


def closed(server: EchoServer, session: str, key: str = "ann's") -> None:
    assert post(server, "/close_session", {"session_id": session}, key).status_code == 200


def refused(answer: httpx2.Response, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    for word in words:
        assert word in error["message"], error
    return error


def turn(server: EchoServer, session: str, text: str, key: str = "ann's", **fields: Any) -> httpx2.Response:
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 5, "seed": 3},
        "session_params": {"id": session, "rid": None},
    }
    return post(server, "/generate", {**body, **fields}, key)


def test_concurrent_session_turns_equal_whole_prompts(server: EchoServer) -> None:
    sessions = {opened(server): [] for _ in range(4)}
    for number in range(4):
        for session, history in sessions.items():
            text = f"{session[:2]} turn {number}: "
            answer = turn(server, session, text).json()
            prompt = [*history, *text.encode()]
            assert answer["output_ids"] == ORACLE.output(prompt, 3, 5, {FAKE_EOS})
            assert answer["meta_info"]["prompt_tokens"] == len(prompt)
            if number:
                assert answer["meta_info"]["cached_tokens"] >= (len(history) - 1) // 4 * 4
            sessions[session] = [*prompt, *answer["output_ids"]]
    for session in sessions:
        closed(server, session)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_holds_requests_and_turns_until_it_ends(server: EchoServer, mode: str) -> None:
    """On all replicas. The server stays healthy, and a turn that is aborted does not count."""
    session = opened(server)
    history = [*b"first", *turn(server, session, "first").json()["output_ids"]]
    assert post(server, "/pause_generation", {"mode": mode}, "eve's").json()["status"] == "ok"
    body = {"text": "x", "sampling_params": {"max_new_tokens": 5, "seed": 3}}
    with ThreadPoolExecutor(8) as pool:
        try:
            held = pool.submit(turn, server, session, "next")
            waiting = [pool.submit(post, server, "/generate", body) for _ in range(6)]
            wait_for(lambda: requests_in_flight(server) == 7)
            assert server.http.get("/health").status_code == 200
            if mode == "abort":
                post(server, "/pause_generation", {}, "eve's")
                wait_for(lambda: requests_in_flight(server) == 0)
        finally:
            assert post(server, "/continue_generation", {"torch_empty_cache": True}, "eve's").json()["status"] == "ok"
    answers = [one.result(20).json() for one in (held, *waiting)]
    if mode == "abort":
        assert {one["meta_info"]["finish_reason"]["type"] for one in answers} == {"abort"}
    else:
        history += b"next"
        assert answers[0]["output_ids"] == ORACLE.output(history, 3, 5, {FAKE_EOS})
        history += answers[0]["output_ids"]
        assert all(one["output_ids"] == ORACLE.output([*b"x"], 3, 5, {FAKE_EOS}) for one in answers[1:])
    last = turn(server, session, "last").json()
    assert last["output_ids"] == ORACLE.output([*history, *b"last"], 3, 5, {FAKE_EOS})
    closed(server, session)


def requests_in_flight(server: EchoServer) -> int:
    load: int = server.http.get("/load", headers={"Authorization": "Bearer eve's"}).json()["server_load"]
    return load


def test_weights_are_updated_on_all_replicas(keys: Path) -> None:
    body = {"text": "a long prompt", "sampling_params": {"max_new_tokens": 5, "seed": 3}}

    async def connect(config: ServerConfig) -> EngineClient:
        return await connect_engines(config.model_copy(update={"api_key": "eve's"}), ByteTokenizer())

    with (
        serve_echo(launch=three, api_keys=keys, page_size=4, max_total_tokens=512, weight_version="of birth") as behind,
        serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}", api_keys=keys) as server,
    ):
        for path, status, namespace in (("missing", 400, None), ("new", 200, "new"), ("newer", 200, "newer")):
            update = {"model_path": path, "weight_version": f"of {path}"} if path != "newer" else {"model_path": path}
            answer = post(server, "/update_weights_from_disk", update, "eve's")
            assert answer.status_code == status, answer.text
            if status == 400:
                refused(answer, 400, "missing does not exist", "replicas that had no error")
            else:
                assert answer.json()["num_paused_requests"] == 0
            wanted = ORACLE.output([*b"a long prompt"], 3, 5, {FAKE_EOS}, namespace)
            for _ in range(4):
                told = post(server, "/generate", body).json()
                assert told["output_ids"] == wanted
                assert told["meta_info"]["weight_version"] == ("of birth" if status == 400 else "of new")
        assert post(behind, "/v1/completions", {"prompt": "x"}).json()["metadata"] == {"weight_version": "of new"}
        for path in ("/model_info", "/weight_version", "/get_weight_version", "/weight_info"):
            info = behind.http.get(path, headers={"Authorization": "Bearer bob's"}).json()
            assert info["weight_version"] == "of new"
        long = {"model_path": "new", "weight_version": "v" * 129}
        error = refused(post(server, "/update_weights_from_disk", long, "eve's"), 400, "128")
        assert error["param"] == "weight_version"
        error = refused(post(server, "/update_weight_version", {"new_version": "v" * 129}, "eve's"), 400, "128")
        assert error["param"] == "new_version"
        renamed = post(server, "/update_weight_version", {"new_version": "renamed"}, "eve's")
        assert renamed.json()["new_version"] == "renamed"
        for _ in range(4):
            told = post(server, "/generate", body).json()
            assert told["output_ids"] == ORACLE.output([*b"a long prompt"], 3, 5, {FAKE_EOS}, "newer")
            assert told["meta_info"]["weight_version"] == "renamed"
        assert post(server, "/release_memory_occupation", {}, "eve's").json() == {"success": True}
        for _ in range(4):
            assert refused(post(server, "/generate", body), 503, "kv_cache, weights")["code"] == "memory_released"
        assert post(server, "/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}, "eve's").status_code == 200
        for _ in range(4):
            assert post(server, "/generate", body).json()["output_ids"] == wanted
        unknown = refused(post(server, "/release_memory_occupation", {"tags": ["x"]}, "eve's"), 400, "kv_cache")
        assert unknown["param"] == "tags[0]"


def test_a_pause_needs_a_known_mode(server: EchoServer) -> None:
    error = refused(post(server, "/pause_generation", {"mode": "sleep"}, "eve's"), 400, "abort", "retract", "in_place")
    assert error["param"] == "mode"


def test_a_session_belongs_to_its_caller(server: EchoServer) -> None:
    """Another key gets the same error as for a missing session; clients may choose the id."""
    session = opened(server, session_id="mine")
    assert session == "mine"
    assert turn(server, session, "a").status_code == 200
    error = refused(turn(server, "mine", "b", "bob's"), 404, "mine")
    assert error["code"] == "session_not_found"
    refused(post(server, "/close_session", {"session_id": "mine"}, "bob's"), 404, "mine")
    refused(turn(server, "nobody's", "b"), 404, "nobody's")
    refused(post(server, "/open_session", {"capacity_of_str_len": 0, "session_id": "mine"}), 400, "mine")
    closed(server, "mine")
    refused(turn(server, "mine", "c"), 404, "mine")
    refused(post(server, "/close_session", {"session_id": "mine"}), 404, "mine")


@pytest.mark.parametrize(
    "field", [{"offset": 3}, {"replace": True}, {"drop_previous_output": True}, {"rid": "another"}]
)
def test_fields_that_do_not_append_are_refused_by_name(server: EchoServer, field: dict[str, Any]) -> None:
    session = opened(server)
    try:
        first = turn(server, session, "ab").json()
        error = refused(turn(server, session, "c", session_params={"id": session, **field}), 400, session)
        assert error["param"] == f"session_params.{next(iter(field))}"
        last = {"id": session, "rid": first["meta_info"]["id"], "offset": 0, "replace": False}
        assert turn(server, session, "d", session_params=last).status_code == 200
    finally:
        closed(server, session)


def test_a_turn_has_one_prompt_and_one_output(server: EchoServer) -> None:
    session = opened(server)
    try:
        refused(turn(server, session, "a", sampling_params={"n": 2}), 400, session)
        beyond = turn(server, session, "ab", return_logprob=True, logprob_start_len=2)
        assert refused(beyond, 400, session, "[-1, 1]", "2 new tokens", "got 2")["param"] == "logprob_start_len"
        refused(turn(server, session, ["a", "b"]), 400, session, "one after the other")
        several = {"prompt": ["a", "b"], "session_params": {"id": session}}
        refused(post(server, "/v1/completions", several), 400, session, "one after the other")
        with_logprobs = turn(server, session, "a", return_logprob=True).json()
        assert len(with_logprobs["meta_info"]["output_token_logprobs"]) == 5
    finally:
        closed(server, session)


def test_logprobs_of_turns_equal_those_of_whole_conversations(server: EchoServer) -> None:
    """In streams too; `echo` covers the tokens it repeats."""
    session, history = opened(server), list[int]()
    wanted = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 5, "seed": 3}}
    for number, text in enumerate(("first ", "second", "the third turn", "4")):
        prompt = [*history, *text.encode()]
        alone = {**wanted, "input_ids": prompt, "logprob_start_len": len(history)}
        expected = post(server, "/generate", alone).json()["meta_info"]["input_token_logprobs"]
        answer = turn(server, session, text, stream=number == 2, **wanted)
        found = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if number == 2 else answer.json()
        assert found["meta_info"]["input_token_logprobs"] == expected, number
        assert [one[1] for one in expected] == list(text.encode())
        assert (expected[0][0] is None) == (number == 0)
        history = [*prompt, *found["output_ids"]]
    body = {"max_tokens": 3, "seed": 3, "temperature": 1.0, "logprobs": 0, "echo": True}
    whole = post(server, "/v1/completions", {**body, "prompt": [*history, *b"and more"]}).json()["choices"][0]
    last = {**body, "prompt": "and more", "session_params": {"id": session}}
    part = post(server, "/v1/completions", last).json()["choices"][0]
    assert part["logprobs"]["tokens"][:8] == list("and more")
    assert part["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][len(history) :]
    assert part["logprobs"]["text_offset"][:8] == list(range(8))
    closed(server, session)


def test_the_openai_routes_take_turns_too(server: EchoServer) -> None:
    session = opened(server)
    fields = {"session_params": {"id": session}, "max_tokens": 4, "seed": 3, "temperature": 1.0}
    first = post(server, "/v1/completions", {"prompt": "ab", "logprobs": 0, **fields}).json()
    text = first["choices"][0]["text"]
    second = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "c"}], **fields}).json()
    assert first["usage"]["prompt_tokens"] == 2
    assert second["usage"]["prompt_tokens"] == 2 + 4 + len(b"user: c\n"), text
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, **fields}
    streamed = post(server, "/v1/completions", body).text.split("\n\n")
    usage = json.loads(streamed[-3].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens"] == second["usage"]["total_tokens"] + 1
    error = refused(post(server, "/v1/completions", {"prompt": "c", **fields, "session_params": {"id": "x"}}), 404, "x")
    assert error["param"] == "session_params.id"
    closed(server, session)


class Opening(ByteTokenizer):
    """Prepends `before` to texts; a chat starts as texts do, and each message starts with an STX."""

    def __init__(self, before: str) -> None:
        self.before = before

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(self.before + text if add_special_tokens else text)

    def render_chat(self, messages: Sequence[dict[str, object]], **options: Any) -> str:
        return self.before + "".join(f"\2{message['content']}\n" for message in messages) + "\2"


@pytest.mark.parametrize(
    ("before", "bos"),
    [pytest.param("\1", 1, id="BOS before texts"), pytest.param("", 2, id="BOS before each message"), ("", None)],
)
@pytest.mark.parametrize("router", [False, True])
def test_later_turns_have_no_bos_but_keep_message_starts(before: str, bos: int | None, router: bool) -> None:
    def load(config: EngineConfig, channel: CoreChannel) -> FakeModelCore:
        core = load_fake_model(config, channel)
        info = dataclasses.replace(core.ready.model_info, bos_token_id=bos)
        core.ready = msgspec.structs.replace(core.ready, model_info=info)
        return core

    async def launch(config: ServerConfig) -> EngineClient:
        return await launch_core(config, in_process=True, load=load, load_tokenizer=lambda config: Opening(before))

    async def connect(config: ServerConfig) -> EngineClient:
        return await connect_engines(config, Opening(before))

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_echo(launch=launch, page_size=4))
        if router:
            server = stack.enter_context(serve_echo(launch=connect, connect=f"127.0.0.1:{server.port}"))
        session, length = opened(server), len(before)
        fields = {"session_params": {"id": session}, "max_tokens": 3, "ignore_eos": True}
        for number in range(2):
            body = {"messages": [{"role": "user", "content": "ab"}], **fields}
            length += len("\2ab\n\2")
            assert post(server, "/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == length, number
            length += 3
        for prompt, adds in (("x", 1), ([2, 7], 2)):
            length += adds
            answer = post(server, "/v1/completions", {"prompt": prompt, **fields}).json()
            assert answer["usage"]["prompt_tokens"] == length
            length += 3


def test_a_session_continues_after_a_stop_string(server: EchoServer) -> None:
    """The text ends at the string; the session continues after the last output token, as if the client sent all of
    it."""
    session = opened(server)
    sampling = {"max_new_tokens": 40, "seed": 3, "ignore_eos": True}
    free = ORACLE.output(list(b"ab"), 3, 40, set())
    stop = ByteTokenizer().decode(free[6:8])
    first = turn(server, session, "ab", sampling_params={**sampling, "stop": stop}).json()
    assert first["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    seen = first["output_ids"]
    assert len(seen) <= 8
    second = turn(server, session, "c").json()
    assert second["output_ids"] == ORACLE.output([*b"ab", *seen, *b"c"], 3, 5, {FAKE_EOS})
    closed(server, session)


def test_sessions_time_out_while_the_engine_sleeps(server: EchoServer) -> None:
    for _ in range(50):  # on a busy machine it may have timed out before its first turn
        session = opened(server, timeout=0.2)
        if (status := turn(server, session, "ab").status_code) != 404:
            break
    assert status == 200

    def is_gone() -> bool:
        loads = server.http.get("/metrics", headers={"Authorization": "Bearer eve's"})
        return "sglang:num_streaming_sessions" in loads.text and turn(server, session, "c").status_code == 404

    time.sleep(0.4)
    wait_for(is_gone)
    refused(post(server, "/open_session", {"capacity_of_str_len": 0, "timeout": 0}), 400, "timeout")


@pytest.mark.parametrize("timeout", [3e6, 1e308])
def test_very_long_timeouts_are_accepted(server: EchoServer, timeout: float) -> None:
    """An idle engine sleeps until the first session times out."""
    session = opened(server, timeout=timeout)
    time.sleep(0.1)
    assert turn(server, session, "ab").status_code == 200
    closed(server, session)


def test_the_number_of_sessions_is_limited_and_in_the_metrics(server: EchoServer) -> None:
    sessions = []
    for _ in range(13):
        answer = post(server, "/open_session", {"capacity_of_str_len": 0, "streaming": True})
        if answer.status_code != 200:
            break
        sessions.append(answer.json())
    assert refused(answer, 503)["code"] == "too_many_sessions"
    assert 4 <= len(sessions) <= 12
    for session in sessions:
        closed(server, session)
    closed(server, opened(server))


def test_stored_responses_keep_their_kv_and_make_room_for_sessions(server: EchoServer) -> None:
    """Of the sessions that keep KV, those that clients have opened stay."""
    mine = opened(server)
    seen = turn(server, mine, "ab").json()["output_ids"]

    def respond(text: str, **fields: Any) -> dict[str, Any]:
        answer = post(server, "/v1/responses", {"input": text, "max_output_tokens": 2, **fields})
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def held() -> int:
        info = server.http.get("/server_info", headers={"Authorization": "Bearer eve's"}).json()
        states = [each for one in info["internal_states"] for each in one.get("replicas", [one])]
        return sum(state["num_sessions"] for state in states)

    respond("not stored", store=False)
    assert held() == 1
    first = respond("some words")
    second = respond("more", previous_response_id=first["id"])
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= len("some words")
    assert held() == 2
    for response in (first, second):  # the last response of a session ends it
        assert held() == 2
        server.http.delete(f"/v1/responses/{response['id']}", headers={"Authorization": "Bearer ann's"})
    assert held() == 1
    responses = [respond(f"number {number}") for number in range(24)]  # more than there may be sessions
    closed(server, opened(server))
    of_bob = post(server, "/v1/responses", {"input": "of bob", "max_output_tokens": 2}, "bob's").json()
    again = turn(server, mine, "c").json()
    assert again["output_ids"] == ORACLE.output([*b"ab", *seen, *b"c"], 3, 5, {FAKE_EOS})
    for response in responses:
        server.http.delete(f"/v1/responses/{response['id']}", headers={"Authorization": "Bearer ann's"})
    server.http.delete(f"/v1/responses/{of_bob['id']}", headers={"Authorization": "Bearer bob's"})
    assert held() == 1
    closed(server, mine)


def test_metrics_of_sessions() -> None:
    """A session that keeps its pages until a request needs the whole pool, and one that times out."""

    def figures() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        values = [line.split(" ") for line in lines if "session" in line and not line.startswith("#")]
        return {name.split("{")[0].removeprefix("sglang:"): float(value) for name, value in values}

    def tells(sessions: int, tokens: int, let_go: int, timed_out: int) -> None:
        wanted = {
            "num_streaming_sessions": sessions,
            "streaming_session_held_tokens": tokens,
            "num_session_pins_let_go_total": let_go,
            "num_sessions_timed_out_total": timed_out,
        }
        wait_for(lambda: wanted.items() <= figures().items())

    with serve_echo(launch=one, page_size=4, max_total_tokens=64) as server:
        server.http.post("/open_session", json={"session_id": "s", "streaming": True}).raise_for_status()
        tells(1, 0, 0, 0)
        body = {"input_ids": list(range(1, 19)), "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        server.http.post("/generate", json={**body, "session_params": {"id": "s"}}).raise_for_status()
        tells(1, (18 + 8 - 1) // 4 * 4, 0, 0)
        server.http.post("/open_session", json={"session_id": "t", "timeout": 0.05}).raise_for_status()
        tells(1, 24, 0, 1)
        body = {"input_ids": list(range(20, 75)), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        server.http.post("/generate", json=body).raise_for_status()
        tells(1, 0, 1, 1)


def test_bad_bodies_are_refused(server: EchoServer) -> None:
    for path, body in (
        ("/open_session", {"capacity_of_str_len": -1}),
        ("/open_session", {"capacity_of_str_len": "5"}),
        ("/open_session", {"capacity_of_str_len": 5, "session_id": ""}),
        ("/open_session", {"capacity_of_str_len": 5, "session_id": "x" * 2000}),
        ("/open_session", {"capacity_of_str_len": 5, "timeout": -1}),
        ("/close_session", {}),
        ("/generate", {"text": "a", "session_params": {"rid": "x"}}),
        ("/generate", {"text": "a", "session_params": {"id": 5}}),
        ("/generate", {"text": "a", "session_params": {"id": "x", "unheard_of": True}}),
        ("/generate", {"text": "a", "session_params": [{"id": "x"}, {"id": "y"}]}),
    ):
        assert post(server, path, body).status_code == 400, (path, body)
    assert post(server, "/generate", {"text": "a", "session_params": {}}).status_code == 200


def test_operators_can_inspect_the_cache(server: EchoServer, tmp_path: Path) -> None:
    session = opened(server)
    turn(server, session, "abcdefgh")
    refused(server.http.get("/cache_report", headers={"Authorization": "Bearer ann's"}), 403)
    picture = tmp_path / "cache.svg"
    result = CliRunner().invoke(cache_report, ["--url", server.url, "--api-key", "eve's", "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    assert session[:20] in result.output
    assert "ann" in result.output
    assert picture.read_text().startswith("<svg")
    closed(server, session)


def test_errors_of_a_cache_report_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [httpx2.Response(200, text="<html>\x1b"), httpx2.Response(200, json=[]), httpx2.Response(500)]
    answers.insert(0, httpx2.Response(200, json={"replicas": [{"replica": 0}]}))
    answers.append(httpx2.Response(200, json={"replicas": []}))
    monkeypatch.setattr(httpx2, "get", lambda *args, **options: answers.pop())
    assert run_command(cache_report, "cache-report", ["--svg", str(tmp_path / "missing" / "cache.svg")]) == 2
    while answers:
        assert run_command(cache_report, "cache-report", []) == 2
    monkeypatch.undo()
    assert run_command(cache_report, "cache-report", ["--url", "http://[::1"]) == 2
    assert run_command(cache_report, "cache-report", ["--url", "http://127.0.0.1:9", "--api-key", "ö"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 7
    for line, words in zip(
        told,
        (
            "cannot be written",
            "500",
            "did not return a cache report",
            "did not return a cache report",
            "did not return a cache report",
            "answer",
            "answer",
        ),
        strict=True,
    ):
        assert words in line
        assert line.isprintable()


def test_a_cache_report_of_a_server_that_refuses(server: EchoServer) -> None:
    assert run_command(cache_report, "cache-report", ["--url", server.url, "--api-key", "nobody's"]) == 2
    assert run_command(cache_report, "cache-report", ["--url", "http://127.0.0.1:9"]) == 2
