"""Work that never ends is interrupted; work that ends is left alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.echo_server import serve_echo
from helpers.engine_fakes import ByteTokenizer
from helpers.tiny_models import make_tiny_tokenizer

from sglang_jax.checkpoint import Tokenizer
from sglang_jax.server import openai_chat
from sglang_jax.server.interruption import in_limited_thread


def endless() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:  # a program that ends for nothing
            continue


async def test_work_that_ends() -> None:
    assert await in_limited_thread(lambda: 5, 1.0) == 5
    with pytest.raises(KeyError, match="a"):
        await in_limited_thread(lambda: {}["a"], 1.0)


async def test_work_that_does_not_end() -> None:
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
        await in_limited_thread(endless, 0.2)


async def test_work_that_nobody_waits_for_any_more() -> None:
    before = threading.active_count()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_limited_thread(endless, 1000.0), 0.3)
    cpu = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - cpu < 0.4
    assert threading.active_count() <= before + 1  # it went back to its pool


async def test_waiting_is_no_computing() -> None:
    await in_limited_thread(lambda: time.sleep(0.5), 0.1)


async def test_an_interruption_meets_nobody_else() -> None:
    """Work that ends about when its time is up; the threads that ran it go on to run what comes next."""

    def spin(seconds: float) -> str:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return "done"

    ended = await asyncio.gather(
        *[in_limited_thread(lambda: spin(0.1), 0.1) for _ in range(10)], return_exceptions=True
    )
    assert all(one == "done" or isinstance(one, TimeoutError) for one in ended), ended
    assert await asyncio.gather(*[in_limited_thread(lambda: spin(0.0), 9.0) for _ in range(40)]) == ["done"] * 40


class LoopingTokenizer(ByteTokenizer):
    """With a real template, in which each message goes through all messages, four times over."""

    def __init__(self, folder: Path) -> None:
        tokenizer = make_tiny_tokenizer(folder)
        loops = "".join("{% for " + name + " in messages %}" for name in "abcd") + "{% endfor %}" * 4
        tokenizer.chat_template = loops + "{% for message in messages %}{{ message.content }}{% endfor %}"
        self._real = Tokenizer(tokenizer, "test")

    def check_roles(self, roles: Sequence[object]) -> None:
        """All are known."""

    def render_chat(self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True) -> str:
        return self._real.render_chat(messages, add_generation_prompt=add_generation_prompt)


def test_a_template_that_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served while it does."""
    monkeypatch.setattr(openai_chat, "TEMPLATE_SECONDS", 0.5)
    with serve_echo(load_tokenizer=lambda _: LoopingTokenizer(tmp_path)) as server:
        good = {"messages": [{"role": "user", "content": "a"}] * 2}
        assert server.http.post("/v1/chat/completions", json=good).json()["choices"][0]["message"]["content"] == "aa"
        looping = server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2000})
        longest = 0.0
        looping.settimeout(0.02)
        answer = b""
        begin = time.monotonic()
        while b"}}" not in answer and time.monotonic() - begin < 60:
            asked = time.monotonic()
            assert server.http.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - asked)
            try:
                answer += looping.recv(65536)
            except TimeoutError:
                continue
        looping.close()
    assert b"400 Bad Request" in answer
    assert b"the chat template computed for more than 0.5 s on 2000 messages, and was stopped" in answer
    assert longest < 5
