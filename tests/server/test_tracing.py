"""Traces, as a stand-in for an OpenTelemetry collector receives them."""

from __future__ import annotations

import builtins
import itertools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from helpers.collector import Collector, SeenSpan, run_collector
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import ByteTokenizer, load_fake_model
from helpers.replica_fakes import fake_replicas
from pydantic import ValidationError

from sglang_jax.config import LoadBalanceMethod, ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.types import EngineClient, GenerateInput
from sglang_jax.errors import ConfigError
from sglang_jax.sampling import SamplingParams
from sglang_jax.server import otlp
from sglang_jax.server.embeddings import embeddings_router
from sglang_jax.server.otlp import OtlpSpans, traces_url
from sglang_jax.server.remote_replicas import connect_engines
from sglang_jax.server.scores import scores_router
from sglang_jax.server.serve import traces_of
from sglang_jax.server.tracing import (
    MAX_TRACED_COMPLETIONS,
    OPERATIONS,
    OPERATIONS_ON_TEXTS,
    CompletionTrace,
    RequestTrace,
)

SECRET = "zebra"
HI = [{"role": "user", "content": SECRET}]
NAMES = iter(f"{number:032x}" for number in itertools.count(1))
CALLER = "00000000000000aa"

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": SECRET, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "stop": "quagga"}},
    "/v1/completions": {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "seed": 3},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 5, "ignore_eos": True},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 16},
    "/v1/messages": {"model": "default", "messages": HI, "max_tokens": 5},
    "/api/chat": {"model": "default", "messages": HI, "stream": False, "options": {"num_predict": 5}},
    "/api/generate": {"model": "default", "prompt": SECRET, "stream": False, "options": {"num_predict": 5}},
}
"""A request to each route that generates."""

TEXTS: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "a"},
    "classify": {"input": "a"},
    "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
}
"""What the routes for vectors and scores are asked, by their operations."""


@pytest.fixture(scope="module", autouse=True)
def quick_export() -> Iterator[None]:
    """Spans are sent every 20 ms; the default is 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield


@pytest.fixture(scope="module")
def collector(quick_export: None) -> Iterator[Collector]:
    with run_collector() as collector:
        yield collector


async def launch_two(config: ServerConfig) -> AsyncEngineClient:
    return await fake_replicas(2, LoadBalanceMethod.ROUND_ROBIN, config)


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[EchoServer]:
    """Two replicas over `FakeRunner`."""
    with serve_echo(
        launch=launch_two, served_model_name=("one", "two"), page_size=4, otlp_traces_endpoint=collector.url
    ) as server:
        yield server


@pytest.fixture(scope="module")
def slow(collector: Collector) -> Iterator[EchoServer]:
    """Echoes one token every 20 ms."""
    with serve_echo(model_path="echo:0.02", otlp_traces_endpoint=collector.url) as server:
        yield server


def headers(trace_id: str, sampled: int = 1) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-0{sampled}", "tracestate": "vendor=1"}


def post(server: EchoServer, path: str, body: dict[str, Any], trace_id: str, status: int = 200) -> Any:
    response = server.http.post(path, json=body, headers=headers(trace_id))
    assert response.status_code == status, response.text
    return response.json()


def answered(collector: Collector, response_id: str) -> SeenSpan:
    """The span of the request with this answer."""

    def found() -> list[SeenSpan]:
        return [span for span in list(collector.spans) if span.attributes.get("gen_ai.response.id") == response_id]

    wait_for(lambda: bool(found()))
    return found()[0]


def check_tree(spans: list[SeenSpan], completions: int = 1) -> SeenSpan:
    """Checks that each completion waited, was prefilled and decoded, one after the other, within the request. Returns
    the request's span."""
    request = next(span for span in spans if span.server)
    children = [span for span in spans if not span.server]
    assert {span.parent_id for span in children} == {request.span_id}
    for number in range(completions):
        own = {span.name: span for span in children if span.attributes["sglang_jax.completion"] == number}
        assert set(own) == {"queue", "prefill", "decode"}
        queue, prefill, decode = own["queue"], own["prefill"], own["decode"]
        assert request.start <= queue.start <= queue.end == prefill.start
        assert prefill.start <= prefill.end == decode.start
        assert decode.start <= decode.end <= request.end
    assert len(children) == 3 * completions
    return request


def usage_in(path: str, answer: Any) -> tuple[int, int]:
    """Prompt and output tokens that an answer reports."""
    if path == "/generate":
        return answer["meta_info"]["prompt_tokens"], answer["meta_info"]["completion_tokens"]
    if path.startswith("/api/"):
        return answer["prompt_eval_count"], answer["eval_count"]
    usage = answer["usage"]
    if path in ("/v1/responses", "/v1/messages"):
        cached = usage.get("cache_read_input_tokens") or 0  # of messages, not among the input tokens
        return usage["input_tokens"] + cached, usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def test_the_bodies_are_for_all_routes_that_generate(server: EchoServer) -> None:
    assert set(BODIES) == set(OPERATIONS)
    answers = {
        path: server.http.post(path, json={"model": "elsewhere"}).text
        for path, operations in server.http.get("/openapi.json").json()["paths"].items()
        if "post" in operations and "{" not in path
    }
    checked = {path for path, text in answers.items() if "elsewhere" in text and "not served here" in text}
    of_texts = set(OPERATIONS_ON_TEXTS)
    assert of_texts & set(answers) == {"/v1/embeddings", "/classify", "/v1/score", "/v1/rerank"}
    assert checked - set(OPERATIONS) - of_texts <= {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/api/show",
    }


def test_routes_for_texts_are_traced_by_each_of_their_names(server: EchoServer) -> None:
    routers = embeddings_router(server.context), scores_router(server.context)
    served = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    assert "/v2/rerank" in served
    assert served == set(OPERATIONS_ON_TEXTS)


@pytest.mark.parametrize("path", BODIES)
def test_a_trace_continues_the_clients_and_says_what_the_answer_says(
    server: EchoServer, collector: Collector, path: str
) -> None:
    trace_id = next(NAMES)
    answer = post(server, path, BODIES[path], trace_id)
    spans = collector.trace(trace_id)
    request = check_tree(spans)
    found = request.attributes
    assert (request.name, request.parent_id, request.state) == (f"{OPERATIONS[path]} one", CALLER, "vendor=1")
    assert not request.failed
    assert "error.type" not in found
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == usage_in(path, answer)
    decode = spans[-1]
    assert decode.attributes["gen_ai.usage.output_tokens"] == found["gen_ai.usage.output_tokens"]
    assert found["gen_ai.operation.name"] == OPERATIONS[path]
    assert found["gen_ai.request.max_tokens"] == (16 if path == "/v1/responses" else 5)
    assert found["gen_ai.response.finish_reasons"][0] in ("length", "stop")
    assert found["http.response.status_code"] == 200
    identity = answer["meta_info"]["id"] if path == "/generate" else answer.get("id")
    assert identity in (None, found["gen_ai.response.id"])  # Ollama's answers have none
    prefill = next(span for span in spans if span.name == "prefill")
    waited = (prefill.end - request.start) / 1e9
    assert found["gen_ai.server.time_to_first_token"] == pytest.approx(waited, abs=1e-6)
    assert request.resource["service.name"] == "sglang-jax"


def test_nothing_that_a_client_writes_or_reads_is_in_a_trace(server: EchoServer, collector: Collector) -> None:
    for path, body in BODIES.items():
        trace_id = next(NAMES)
        post(server, path, body, trace_id)
        collector.trace(trace_id)
    assert collector.raw
    assert not [word for word in (SECRET, "quagga") if any(word.encode() in sent for sent in collector.raw)]


def test_sampling_parameters_and_models_are_attributes(server: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "seed": 11, "max_tokens": 4}
    answer = post(server, "/v1/completions", {"prompt": "abc", "model": "two", **sampling}, trace_id)
    found = collector.trace(trace_id)[0].attributes
    assert {name: found[f"gen_ai.request.{name}"] for name in sampling} == sampling
    assert (found["gen_ai.request.model"], found["gen_ai.response.model"]) == ("two", answer["model"])
    assert found["gen_ai.request.stream"] is False


def test_cached_tokens_are_those_of_the_answer(server: EchoServer, collector: Collector) -> None:
    for _ in range(3):  # round robin over two replicas
        trace_id = next(NAMES)
        answer = post(server, "/v1/completions", {"prompt": "0123456789abcdef", "max_tokens": 2}, trace_id)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert collector.trace(trace_id)[0].attributes["gen_ai.usage.cache_read.input_tokens"] == cached


def test_streams_and_several_completions(server: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    body = {"prompt": ["abc", "abd"], "n": 2, "max_tokens": 6, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers(trace_id)) as response:
        response.read()
    found = check_tree(collector.trace(trace_id), completions=4).attributes
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (6, 24)
    assert found["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert (found["gen_ai.request.choice.count"], found["sglang_jax.prompts"]) == (2, 2)
    assert found["gen_ai.request.stream"] is True


@pytest.mark.parametrize("path", OPERATIONS_ON_TEXTS)
def test_a_route_for_texts_has_its_operation(server: EchoServer, collector: Collector, path: str) -> None:
    trace_id = next(NAMES)
    answer = post(server, path, {"model": "elsewhere", **TEXTS[OPERATIONS_ON_TEXTS[path]]}, trace_id, 404)
    [request] = collector.trace(trace_id)
    assert request.name == f"{OPERATIONS_ON_TEXTS[path]} one"
    assert request.attributes["http.route"] == path
    assert request.attributes["error.type"] == answer["error"]["code"] == "model_not_found"


def test_what_samples_nothing_has_no_attributes_of_sampling(server: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    post(server, "/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 0, "echo": True}, trace_id)
    found = next(span for span in collector.trace(trace_id) if span.server).attributes
    assert [name for name in found if name.startswith("gen_ai.request.")] == ["gen_ai.request.model"]
    assert found["sglang_jax.prompts"] == 2


def test_only_the_first_completions_have_spans(server: EchoServer, collector: Collector) -> None:
    trace_id, many = next(NAMES), MAX_TRACED_COMPLETIONS + 3
    post(server, "/v1/completions", {"prompt": ["a"] * many, "max_tokens": 1}, trace_id)
    request = check_tree(collector.trace(trace_id), completions=MAX_TRACED_COMPLETIONS)
    assert len(request.attributes["gen_ai.response.finish_reasons"]) == many


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/chat/completions", {"messages": 3}, 400, "invalid_value"),
        ("/v1/completions", {"prompt": "a", "model": "elsewhere"}, 404, "model_not_found"),
        ("/generate", {"text": "a" * 200}, 400, "context_length_exceeded"),
    ],
)
def test_a_refused_request_has_its_error(
    server: EchoServer, collector: Collector, path: str, body: dict[str, Any], status: int, error: str
) -> None:
    trace_id = next(NAMES)
    answer = post(server, path, body, trace_id, status)
    [request] = [span for span in collector.trace(trace_id) if span.server]
    assert request.failed
    assert request.attributes["http.response.status_code"] == status
    assert request.attributes["error.type"] == answer["error"]["code"] == error


def test_an_unsampled_trace_is_not_sent(server: EchoServer, collector: Collector) -> None:
    unsampled, sampled = next(NAMES), next(NAMES)
    response = server.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers(unsampled, 0))
    assert response.status_code == 200
    post(server, "/v1/completions", BODIES["/v1/completions"], sampled)
    assert collector.trace(sampled)
    assert unsampled not in {span.trace_id for span in collector.spans}


def test_other_routes_and_requests_without_a_parent(server: EchoServer, collector: Collector) -> None:
    server.http.get("/v1/models", headers=headers(other := next(NAMES)))
    answer = server.http.post("/v1/completions", json=BODIES["/v1/completions"]).json()
    assert answered(collector, answer["id"]).parent_id == ""
    assert other not in {span.trace_id for span in collector.spans}


@pytest.mark.parametrize("given", ["nonsense", f"00-{'0' * 32}-{CALLER}-01", f"ff-{'a' * 32}-{CALLER}-01-more"])
def test_an_invalid_parent_is_ignored_without_a_log_line(
    server: EchoServer, collector: Collector, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    sent: list[dict[str, str | bytes]] = [
        {"traceparent": given},
        {**headers(trace_id := next(NAMES)), "tracestate": b"a=\xe9, =, b", "baggage": ";;;" * 3000},
    ]
    ids = [
        server.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=each).json()["id"] for each in sent
    ]
    assert collector.trace(trace_id)[0].state == ""
    assert answered(collector, ids[0]).parent_id == ""
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_stream_that_fails_later_has_its_error(collector: Collector) -> None:
    trace_id = next(NAMES)
    body = {"prompt": "a" * 1000, "max_tokens": 1000, "stream": True}
    with (
        serve_echo(model_path="echo:0.02", otlp_traces_endpoint=collector.url) as dying,
        dying.http.stream("POST", "/v1/completions", json=body, headers=headers(trace_id)) as response,
    ):
        parts = response.iter_text()
        next(parts)
        dying.await_(dying.engine.close())
        assert "engine_dead" in "".join(parts)
    request = check_tree(collector.trace(trace_id))
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["error.type"] == "engine_dead"


def test_headers_that_are_repeated(server: EchoServer, collector: Collector) -> None:
    """Members of several `tracestate` count (W3C Trace Context, section 3.3.1); several `traceparent` are not
    a parent."""
    trace_id, other = next(NAMES), next(NAMES)
    for sent in (
        [("traceparent", headers(trace_id)["traceparent"]), ("tracestate", "a=1"), ("tracestate", "b=2")],
        [("traceparent", headers(other)["traceparent"]), ("traceparent", headers(next(NAMES))["traceparent"])],
    ):
        response = server.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=sent)
    assert collector.trace(trace_id)[0].state == "a=1,b=2"
    assert answered(collector, response.json()["id"]).parent_id == ""


def test_an_answer_that_its_client_does_not_wait_for(slow: EchoServer, collector: Collector) -> None:
    seen = len(collector.spans)
    with slow.send("/v1/completions", {"prompt": "a" * 1000, "max_tokens": 1000}):
        wait_for(lambda: slow.running() == 1)
    wait_for(lambda: any(span.server for span in collector.spans[seen:]))
    [request] = [span for span in collector.spans[seen:] if span.server]
    assert request.failed
    assert request.attributes["error.type"] == "cancelled"
    assert request.attributes["http.response.status_code"] == 499


def test_a_stream_that_its_client_cuts_off(slow: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    body = {"prompt": "a" * 1000, "max_tokens": 1000, "stream": True}
    with slow.http.stream("POST", "/v1/completions", json=body, headers=headers(trace_id)) as response:
        next(response.iter_bytes())
    request = check_tree(collector.trace(trace_id))
    assert request.failed
    assert request.attributes["error.type"] == "cancelled"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < request.attributes["gen_ai.usage.output_tokens"] < 1000


def test_an_aborted_request(slow: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    body = {"rid": "abortable", "text": "a" * 1000, "sampling_params": {"max_new_tokens": 1000}, "stream": True}
    with slow.http.stream("POST", "/generate", json=body, headers=headers(trace_id)) as response:
        parts = response.iter_bytes()
        next(parts)
        slow.http.post("/abort_request", json={"rid": "abortable"})
        assert list(parts)
    request = check_tree(collector.trace(trace_id))
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert not request.failed  # as somebody asked for it


def test_a_reply_in_the_background_is_traced_to_its_end(slow: EchoServer, collector: Collector) -> None:
    trace_id = next(NAMES)
    answer = post(slow, "/v1/responses", {"input": "abcdef", "background": True, "max_output_tokens": 16}, trace_id)
    assert answer["status"] in ("queued", "in_progress")
    spans = collector.trace(trace_id)
    ended = slow.http.get(f"/v1/responses/{answer['id']}").json()
    found = next(span for span in spans if span.server).attributes
    assert ended["status"] in ("completed", "incomplete")
    assert found["gen_ai.usage.output_tokens"] == ended["usage"]["output_tokens"] > 0
    assert found["gen_ai.response.id"] == answer["id"]


def test_a_retraction_is_an_event(collector: Collector) -> None:
    trace_id = next(NAMES)
    body = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True}
    with serve_echo(load_fake_model, page_size=4, test_retract=20, otlp_traces_endpoint=collector.url) as server:
        post(server, "/v1/completions", body, trace_id)
        spans = collector.trace(trace_id)
    request = check_tree(spans)
    events = [(event, span) for span in spans for event in span.events]
    assert len(events) == request.attributes["sglang_jax.retractions"] >= 2
    for (name, moment), span in events:
        assert name == "retracted"
        assert span.name == "decode"
        assert span.start <= moment <= span.end


def test_a_retraction_that_is_heard_of_late_is_within_its_span(collector: Collector) -> None:
    writer = OtlpSpans(collector.url)
    trace_id = next(NAMES)
    span = writer.start("chat", headers(trace_id), 0, {})
    trace = RequestTrace(span, "one", 0, 0)
    prompt = trace.prompt(GenerateInput(prompt=[1], sampling=SamplingParams()))
    prompt.completions[0] = CompletionTrace(1.0, row=2.0, first=3.0, last=4.0, end=6.0, retracted=[5.0])
    trace.release()
    writer.close()
    decode = next(one for one in collector.trace(trace_id) if one.name == "decode")
    assert decode.events == [("retracted", decode.end)]


def test_lines_of_a_batch_are_traced(collector: Collector, tmp_path: Path) -> None:
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 3}}'
    with serve_echo(load_fake_model, page_size=4, files_dir=tmp_path, otlp_traces_endpoint=collector.url) as server:
        before = len(collector.spans)
        sent = server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", line)}).json()
        batch = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert server.http.post("/v1/batches", json=batch).status_code == 200
        wait_for(lambda: any(span.server for span in collector.spans[before:]))
        [request] = [span for span in collector.spans[before:] if span.server]
    assert request.attributes["gen_ai.usage.output_tokens"] == 3


async def connect(config: ServerConfig) -> EngineClient:
    return await connect_engines(config, ByteTokenizer())


@pytest.mark.parametrize("sampled", [0, 1])
def test_a_server_behind_a_router_continues_its_trace(server: EchoServer, collector: Collector, sampled: int) -> None:
    trace_id = next(NAMES)
    with serve_echo(
        launch=connect,
        connect=f"127.0.0.1:{server.port}",
        served_model_name="router",
        otlp_traces_endpoint=collector.url,
    ) as router:
        answer = router.http.post("/v1/completions", json={"prompt": "ab"}, headers=headers(trace_id, sampled)).json()
        if not sampled:
            post(router, "/v1/completions", {"prompt": "ab"}, later := next(NAMES))
            assert len([span for span in collector.trace(later, requests=2) if span.server]) == 2
            assert trace_id not in {span.trace_id for span in collector.spans}
            return
        spans = collector.trace(trace_id, requests=2)
    first, behind = sorted((span for span in spans if span.server), key=lambda span: span.start)
    assert (first.name, first.parent_id) == ("text_completion router", CALLER)
    assert (behind.name, behind.parent_id) == ("text_completion one", first.span_id)
    check_tree([behind, *(span for span in spans if not span.server)])
    assert first.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]


def test_a_collector_that_does_not_answer_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    before, answers = set(threading.enumerate()), threading.Event()
    with run_collector(answers) as collector:
        with serve_echo(load_fake_model, page_size=4, otlp_traces_endpoint=collector.url) as server:
            for _ in range(10):
                answer = server.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
                assert answer.status_code == 200
        new = {thread.name: thread for thread in threading.enumerate() if thread not in before}
        waiting = [new["OtelBatchSpanRecordProcessor"], new["last-traces"]]
        assert all(thread.daemon for thread in waiting)  # which do not keep the process alive
        answers.set()
        for thread in waiting:
            thread.join(30)
        assert 0 < len(collector.spans) <= 4 + 8  # of 40: a batch, and the queue


def test_the_last_spans_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with run_collector() as collector:
        with serve_echo(load_fake_model, page_size=4, otlp_traces_endpoint=f"{collector.url}/own/path") as server:
            post(server, "/v1/completions", {"prompt": "ab", "max_tokens": 2}, next(NAMES))
            assert collector.spans == []
        check_tree(collector.spans)
        assert collector.paths == ["/own/path"]


def test_variables_of_the_sdk_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with run_collector() as collector:
        spans = OtlpSpans(collector.url)
        spans.start("a", {}, 1, {}).end(2, {}, None)
        spans.close()
        [span] = collector.spans
    assert span.resource["service.name"] == "my-service"
    assert span.resource["deployment.environment.name"] == "test"
    assert collector.paths == ["/v1/traces"]


@pytest.mark.parametrize("value", ["-1", "100"])  # fewer than a batch, whose default is 512
def test_variables_that_the_sdk_refuses_are_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", value)
    with pytest.raises(ConfigError, match=r"OTEL_BSP_MAX_QUEUE_SIZE.*max_queue_size"):
        OtlpSpans("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/x/v1/traces", "https://a/x/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_usual_one(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "http://a b"])
def test_an_endpoint_that_is_not_a_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="OTLP over gRPC is not supported"):
        ServerConfig(otlp_traces_endpoint=endpoint)


def test_without_the_package_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang_jax.server.otlp")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **others: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with traces_of(ServerConfig()) as traces:
        assert traces is None
    with (
        pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs OpenTelemetry .*\[otel\]"),
        traces_of(ServerConfig(otlp_traces_endpoint="http://a:1")),
    ):
        pass
