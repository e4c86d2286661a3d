"""Long bodies and requests of many prompts do not block the event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
import tracemalloc
from typing import Any

import pytest
from helpers.echo_server import EchoServer, wait_for

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta
from sglang_jax.server import json_body
from sglang_jax.server.callers import Caller, set_caller
from sglang_jax.server.context import MergedStreams
from sglang_jax.server.json_body import LONG_BODY, PAUSE_FACTOR, LongWork
from sglang_jax.server.streaming import RESPONSE_SLICE, json_list_response, json_response

JSON = {"Content-Type": "application/json"}
PADDING = {"user": "x" * (LONG_BODY + 1)}
"""Makes a body long without changing its meaning."""


def burn(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


class TestOneAtATime:
    async def test_other_work_runs_after_each_piece(self) -> None:
        work, took = LongWork(), 0.02
        ends: list[tuple[float, float]] = []

        def piece() -> None:
            begin = time.monotonic()
            burn(took)
            ends.append((begin, time.monotonic()))

        await asyncio.gather(*(work.run(1000, piece) for _ in range(3)))
        pauses = [after[0] - before[1] for before, after in itertools.pairwise(ends)]
        assert min(pauses) >= took * PAUSE_FACTOR * 0.9

    async def test_small_pieces_run_before_large_ones(self) -> None:
        work, done = LongWork(), list[str]()

        async def do(name: str, size: int) -> None:
            await work.run(size, lambda: done.append(name))

        first = asyncio.create_task(do("first", 10))
        large = [asyncio.create_task(do("large", 8 * 2**20)) for _ in range(3)]
        await asyncio.sleep(0)
        small = asyncio.create_task(do("small", 100))
        await asyncio.gather(first, small, *large)
        assert done == ["first", "small", "large", "large", "large"]

    async def test_failed_or_cancelled_work_blocks_no_other(self) -> None:
        work = LongWork()
        with pytest.raises(ZeroDivisionError):
            await work.run(10, lambda: 1 / 0)
        begun, go = threading.Event(), threading.Event()
        running = asyncio.create_task(work.run(10, lambda: (begun.set(), go.wait(10))))
        await asyncio.to_thread(begun.wait, 10)
        waiting = [asyncio.create_task(work.run(10, lambda: "never")) for _ in range(2)]
        await asyncio.sleep(0)
        for task in (running, *waiting):
            task.cancel()
        go.set()
        assert await asyncio.wait_for(work.run(10, lambda: "done"), 10) == "done"

    async def test_tenants_alternate_whatever_their_number_of_pieces(self) -> None:
        """A thousand bodies of one key delayed the others for half a minute."""
        work, done = LongWork(), list[str]()

        async def do(tenant: str) -> None:
            await work.run(1000, lambda: done.append(tenant), tenant)

        flood = [asyncio.create_task(do("flood")) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.gather(*(do("other") for _ in range(3)))
        assert done.count("flood") <= 5
        await asyncio.gather(*flood)


class TestLongBodies:
    @pytest.fixture
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Where bodies are parsed."""
        seen: list[str] = []
        parse = json_body.parse

        def noted(body: bytes) -> Any:
            seen.append(threading.current_thread().name)
            return parse(body)

        monkeypatch.setattr(json_body, "parse", noted)
        return seen

    def test_they_are_parsed_in_a_thread_and_answered_the_same(self, server: EchoServer, threads: list[str]) -> None:
        for body in ({"prompt": "abc"}, {"prompt": "abc", **PADDING}):
            answer = server.http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "abc", answer.text
        assert len(threads) == 2, "each once"
        assert "long-bodies" not in threads[0]
        assert "long-bodies" in threads[1]

    def test_bodies_of_many_objects_are_parsed_in_a_thread(self, server: EchoServer, threads: list[str]) -> None:
        for count in (100, 600):
            body = {"prompt": "a", "metadata": [{}] * count}
            assert len(json.dumps(body)) < LONG_BODY
            assert server.http.post("/v1/completions", json=body).status_code == 200
        assert ["long-bodies" in name for name in threads] == [False, True]

    def test_the_body_of_a_client_that_left_is_dropped(
        self, server: EchoServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its connection was closed for the next one, but its body stayed in the queue."""
        begun, go = list[str](), threading.Event()

        def parse(body: bytes) -> Any:
            begun.append(json.loads(body)["prompt"])
            assert go.wait(20)
            return json.loads(body)

        def at_work() -> int:
            return sum("run_asgi" in task for task in server.tasks())

        monkeypatch.setattr(json_body, "parse", parse)
        first = server.send("/v1/completions", {"prompt": "first", **PADDING})
        wait_for(lambda: begun == ["first"])
        connections = [server.send("/v1/completions", {"prompt": "left", **PADDING}) for _ in range(3)]
        wait_for(lambda: at_work() == 4)
        for connection in connections:
            connection.close()
        wait_for(lambda: at_work() == 1, 10)
        go.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        first.close()
        assert begun == ["first"]

    @pytest.mark.parametrize(
        "content",
        [
            '{"prompt": 5.5, %s}',
            '{"prompt": "a", "n": "two", %s}',
            '{"prompt": "a", "best_guess": 3, %s}',
            '{"prompt": ["a", 1], %s}',
            '{%s, "prompt": "\\ud800"}',
            '{%s, "prompt": "a',
            '{"a": [%s]}',
            "[%s]",
        ],
    )
    @pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "text/plain"])
    def test_their_errors_are_the_same_as_for_short_ones(
        self, server: EchoServer, threads: list[str], content: str, kind: str
    ) -> None:
        answers = []
        for padding in ('"user": "x"', json.dumps(PADDING)[1:-1]):
            body = content.replace("%s", padding if content.startswith("{%") or "{" in content else padding[8:])
            response = server.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
            error = response.json()["error"]
            message = error["message"].partition(", got")[0].partition(" at character")[0]
            answers.append((response.status_code, error["code"], error["param"], message))
        assert answers[0] == answers[1]
        assert answers[0][0] in (400, 415)
        assert all("long-bodies" in name for name in threads[1:])


async def test_prompts_of_one_request_start_a_few_at_a_time() -> None:
    class Stream:
        async def next(self) -> OutputDelta:
            await asyncio.sleep(3600)
            raise AssertionError

        async def close(self) -> None: ...

    made: list[int] = []
    streams = (made.append(number) or Stream() for number in range(500))
    merged = MergedStreams(streams, 100, 4)  # type: ignore[arg-type]  # as far as it is used
    most = 0
    for _ in range(60):
        before = len(made)
        await asyncio.sleep(0)
        most = max(most, len(made) - before)
    assert (most, len(made)) == (4, 100)
    await merged.close()


def test_items_of_an_answer_are_encoded_one_at_a_time() -> None:
    """A thousand logprobs take ten times the memory of their JSON."""
    items = ({f"token {number}": -1.5 - number for number in range(20_000)} for _ in range(20))
    tracemalloc.start()
    response = json_list_response(b"[", items, b"]")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    written_bytes = int(response.headers["Content-Length"])
    assert written_bytes > 5_000_000
    assert peak < 1.5 * written_bytes + 8_000_000


async def test_a_long_answer_is_sent_a_slice_at_a_time() -> None:
    payload = [{"a": "b" * 100, "choices": "[]"}] * 5000
    for response in (json_response(payload), json_list_response(b"[", payload, b"]")):
        sent: list[dict[str, Any]] = []

        async def send(message: Any, sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        await response({"type": "http"}, None, send)  # type: ignore[arg-type]  # nothing is received
        bodies = [message["body"] for message in sent[1:]]
        assert max(map(len, bodies)) <= RESPONSE_SLICE
        assert json.loads(b"".join(bodies)) == payload
        assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, bodies))).encode()


def test_a_long_answer_arrives_whole(server: EchoServer) -> None:
    body = {"prompt": "a" * 200, "echo": True, "logprobs": 20, "n": 12, "max_tokens": 1}
    answer = server.http.post("/v1/completions", json=body)
    assert len(answer.content) > RESPONSE_SLICE
    assert [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]] == [201] * 12
    body = {"text": "a" * 200, "sampling_params": {"n": 12, "max_new_tokens": 1}, "return_logprob": True}
    answer = server.http.post("/generate", json={**body, "logprob_start_len": 0, "top_logprobs_num": 20})
    assert len(answer.content) > RESPONSE_SLICE
    assert len(answer.json()) == 12


def test_many_completions_are_encoded_in_a_thread_one_request_at_a_time(server: EchoServer) -> None:
    """Each request had a thread, and all of them delayed the event loop."""

    def outputs(count: int) -> list[OutputDelta]:
        finish = FinishReason(FinishKind.LENGTH)
        return [
            OutputDelta(
                index=index,
                text="a",
                token_ids=[1],
                prompt_tokens=1,
                completion_tokens=1,
                cached_tokens=0,
                finish=finish,
            )
            for index in range(count)
        ]

    at_once, most = 0, 0

    def write() -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.01)
        at_once -= 1
        return threading.current_thread().name

    async def write_all(*counts: int) -> list[str]:
        set_caller(Caller("anybody"))
        return await asyncio.gather(*(server.context.write_answer(write, outputs(count)) for count in counts))

    names = server.await_(write_all(2, 1024, 1024, 1024))
    assert "long-answers" not in names[0]
    assert all("long-answers" in name for name in names[1:])
    assert most == 1
