"""Commands that ask a running server: what it sends is checked, and a wrong answer is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers.streaming_server import FakeServer, serve_in_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang_jax.cli.bench.commands import bench_serving
from sglang_jax.cli.eval.commands import eval_gsm8k
from sglang_jax.cli.main import run

NO_GZIP = {"content-encoding": "gzip"}
DEEP = b"[" * 100_000


@dataclass
class FixedAnswers(FakeServer):
    """Answers each path with these bytes and headers, others with status 404."""

    answers: dict[str, tuple[bytes, dict[str, str]]] = field(default_factory=dict)

    def application(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        await request.body()
        content, headers = self.answers.get(request.url.path, (b"", {"status": "404"}))
        headers = {"content-type": "application/json", **headers}
        return Response(content, status_code=int(headers.pop("status", "200")), headers=headers)


@pytest.fixture(scope="module")
def server() -> Iterator[FixedAnswers]:
    with serve_in_thread(FixedAnswers()) as running:
        assert isinstance(running, FixedAnswers)
        yield running


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def stream(*events: Any) -> bytes:
    return b"".join(b"data: " + as_json(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def said(text: object, **fields: object) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "stop", **fields}]}


MODELS = as_json({"data": [{"id": "m"}]})
META = {"prompt_tokens": 4, "completion_tokens": 1, "finish_reason": {"type": "length"}}

ASKED = [
    ("/v1/models", b"<html>", {}, "the answer of /v1/models could not be read: JSONDecodeError"),
    ("/v1/models", b"\xff", {}, "could not be read: UnicodeDecodeError"),
    ("/v1/models", b"[]", {}, "could not be read: answer: Input should be an object"),
    ("/v1/models", b'{"data": [{}]}', {}, "could not be read: data.0.id: Field required"),
    ("/v1/models", b'{"data": []}', {}, "does not list a model at /v1/models"),
    ("/v1/models", b"not compressed", NO_GZIP, "could not be read: DecodingError"),
    ("/v1/models", b"", {"status": "302", "location": "/"}, "GET /v1/models gave 302"),
    ("/v1/completions", DEEP, {}, "failed 1 times: the answer of /v1/completions could not be read: RecursionError"),
    ("/v1/completions", b"not compressed", NO_GZIP, "failed 1 times: DecodingError"),
    ("/v1/completions", b"", {"status": "302", "location": "/"}, "failed 1 times: status 302"),
    ("/v1/completions", as_json({"choices": []}), {}, "has no choices"),
    ("/v1/completions", as_json(said(["a"])), {}, "choices.0.text: Input should be a valid string"),
    ("/v1/completions", b'{"choices": [{"text": "1"}], "usage": {"completion_tokens": 1e999}}', {}, "usage.completion"),
    ("/v1/completions", as_json({**said("1"), "usage": {"completion_tokens": -1}}), {}, "usage.completion_tokens"),
    ("/v1/completions", as_json({**said("1"), "usage": [1]}), {}, "usage: Input should be an object"),
]  # fmt: skip

MEASURED = [
    ("sglang", "/model_info", b"<html>", {}, "the answer of /model_info could not be read"),
    ("sglang", "/model_info", b'{"vocab_size": 0}', {}, "could not be read: vocab_size"),
    ("sglang", "/model_info", b'{"vocab_size": null}', {}, "give --vocab-size"),
    ("sglang", "/generate", stream([1]), {}, "the answer of /generate could not be read: answer"),
    ("sglang", "/generate", b"data: {\n\n", {}, "the answer of /generate could not be read: JSONDecodeError"),
    ("sglang", "/generate", b"data: " + DEEP + b"\n\n", {}, "could not be read: RecursionError"),
    ("sglang", "/generate", stream({"text": "a", "meta_info": {**META, "prompt_tokens": "x"}}), {}, "meta_info.prompt"),
    ("sglang", "/generate", stream({"error": {"message": "it is over"}}), {}, "it is over"),
    ("sglang", "/generate", b"not compressed", NO_GZIP, "DecodingError"),
    ("openai", "/v1/completions", stream([1]), {}, "the answer of /v1/completions could not be read: answer"),
    ("openai", "/v1/completions", stream({"choices": [], "usage": {"prompt_tokens_details": 1}}), {}, "details"),
    ("openai-chat", "/v1/chat/completions", stream({"choices": [{"delta": "a"}]}), {}, "choices.0.delta"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "content", "headers", "message"), ASKED)
def test_an_evaluation_reports_a_wrong_answer(
    server: FixedAnswers, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    path: str, content: bytes, headers: dict[str, str], message: str,
) -> None:  # fmt: skip
    (tmp_path / "x").write_text('{"question": "a", "answer": "#### 1"}')
    server.answers = {"/v1/models": (MODELS, {}), path: (content, headers)}
    words = ["--data", str(tmp_path / "x"), "--num-shots", "0", "--base-url", f"http://127.0.0.1:{server.port}/v1/"]
    assert run(eval_gsm8k, "eval", words) == 1
    told = capsys.readouterr()
    assert message in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(("backend", "path", "content", "headers", "message"), MEASURED)
def test_a_measurement_reports_a_wrong_answer(
    server: FixedAnswers, capsys: pytest.CaptureFixture[str],
    backend: str, path: str, content: bytes, headers: dict[str, str], message: str,
) -> None:  # fmt: skip
    info = as_json({"vocab_size": 100})
    server.answers = {"/v1/models": (MODELS, {}), "/model_info": (info, {}), path: (content, headers)}
    words = ["--backend", backend, "--port", str(server.port), "--num-prompts", "1", "--warmup-requests", "0"]
    assert run(bench_serving, "bench", words) != 0
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("count", [b"<html>", b"[]", b'{"count": "x"}', b'{"count": -1}'])
def test_outputs_are_not_counted_where_the_server_does_not_count(
    server: FixedAnswers, capsys: pytest.CaptureFixture[str], count: bytes
) -> None:
    """The output has half of a surrogate pair, which no request can have."""
    generated = stream({"text": "a \ud800", "output_ids": [7], "meta_info": META})
    server.answers = {"/v1/models": (MODELS, {}), "/generate": (generated, {}), "/tokenize": (count, {})}
    words = ["--port", str(server.port), "--num-prompts", "1", "--warmup-requests", "0", "--vocab-size", "9"]
    assert run(bench_serving, "bench", words) == 0
    assert "Outputs were not tokenized again" in capsys.readouterr().out
