"""Small requests that could slow others down: many texts, many events, many starts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import ByteTokenizer

from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.types import OutputDelta
from sglang_jax.server import callers, context
from sglang_jax.server.callers import TokenBucket

# -- Texts to tokenize -------------------------------------------------------------------------------------------------


def test_the_number_of_texts_of_a_tokenize_request_is_limited(server: EchoServer) -> None:
    """A million texts blocked the event loop for hours: the counts of all earlier texts were summed for each one."""
    response = server.http.post("/tokenize", json={"prompt": ["a"] * 1025})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert "prompt has 1025 texts; the limit per request is 1024 (--max-completions-per-request)" in error["message"]
    assert server.http.post("/tokenize", json={"prompt": ["a"] * 1024}).json()["count"] == [1] * 1024


def test_nothing_is_tokenized_for_a_client_that_left(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = list[str](), list[str]()

    async def encode(self: AsyncEngineClient, text: str, *_: Any, **__: Any) -> list[int]:
        begun.append(text)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(text)
        raise AssertionError

    monkeypatch.setattr(AsyncEngineClient, "encode", encode)
    connection = server.send("/tokenize", {"prompt": ["a", "b"]})
    wait_for(lambda: begun == ["a"])
    connection.close()
    wait_for(lambda: ended == ["a"])
    assert begun == ["a"]


# -- Chats to render ---------------------------------------------------------------------------------------------------


class GatedTemplate(ByteTokenizer):
    """Blocks rendering until it is opened; records the last message of the chats it started."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def render_chat(self, messages: Sequence[dict[str, object]], **more: Any) -> str:
        self.begun.append(str(messages[0]["content"]))
        assert self.open.wait(20)
        return super().render_chat(messages, **more)


def test_chats_are_rendered_round_robin_and_not_for_clients_that_left() -> None:
    """Chats of one client are rendered in order."""
    template = GatedTemplate()
    with serve_echo(load_tokenizer=lambda _: template) as server:

        def say(content: str, more: int = 0) -> socket.socket:
            messages = [{"role": "user", "content": content}] + [{"role": "user", "content": ""}] * more
            waiting = server.await_(number_waiting(server))
            connection = server.send("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
            if template.begun and more:
                wait_for(lambda: server.await_(number_waiting(server)) == waiting + 1)
            return connection

        connections = [say("first", 300)]
        wait_for(lambda: template.begun == ["first"])
        connections += [say("flood", 300), say("flood", 300), say("left", 100), say("medium", 100), say("short")]
        wait_for(lambda: template.begun == ["first", "short"])  # at the same time
        connections.pop(3).close()
        wait_for(lambda: server.await_(number_waiting(server)) == 3)
        template.open.set()
        for connection in connections:
            connection.settimeout(20)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()
    assert template.begun == ["first", "short", "medium", "flood", "flood"]


async def number_waiting(server: EchoServer) -> int:
    return len(server.context._templates._pieces)


# -- Logprobs of prompts -----------------------------------------------------------------------------------------------


def test_prompts_with_many_logprobs_start_a_few_at_a_time(
    slow_server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them waited in the front end at once for the one that was written."""
    monkeypatch.setattr(context, "LOGPROBS_AT_ONCE", 300)
    body = {"input_ids": [[65] * 50] * 8, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    connection = slow_server.send("/generate", {**body, "sampling_params": {"max_new_tokens": 50}})
    wait_for(lambda: slow_server.running() == 2)
    assert [slow_server.running() for _ in range(10)] == [2] * 10
    connection.close()
    wait_for(lambda: slow_server.running() == 0)


# -- Keys and health ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
def test_health_answers_head_requests(server: EchoServer, path: str) -> None:
    """Load balancers send HEAD; two of the three routes answered 405."""
    response = server.http.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_counting_the_usage_takes_constant_time() -> None:
    """All earlier completions were scanned for each new prompt."""

    class Places(dict[tuple[int, int], int]):
        def __iter__(self) -> Any:
            raise AssertionError("all places are looked through")

    bucket = TokenBucket(1_000_000, clock=lambda: 0.0)
    usage = callers.Usage(bucket)
    usage._taken = Places()
    for number in range(3):
        for index in range(2):
            for tokens in (1, 4):
                usage.add(number, output(index, prompt_tokens=10, completion_tokens=tokens))
    assert bucket._level == 1_000_000 - 3 * (10 + 2 * 4)


def output(index: int, **fields: int) -> OutputDelta:
    return OutputDelta(index=index, text="", token_ids=[], cached_tokens=0, **fields)
