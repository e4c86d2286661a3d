"""A chat template that uses up all time or memory: its request is refused, and others are served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.echo_server import serve_echo
from helpers.engine_fakes import ByteTokenizer
from helpers.tiny_models import make_tiny_tokenizer

from sglang_jax.checkpoint.tokenizer import Tokenizer

LOOPS = "".join("{% for " + name + " in messages %}" for name in "abcd") + "{% endfor %}" * 4
BOMB = "{% if messages | length > 2 %}{{ 'a' * 3000000000 }}{% endif %}"


class TemplateTokenizer(ByteTokenizer):
    """Has a real template: the one under test, then the text of the messages."""

    def __init__(self, folder: Path, trial: str) -> None:
        tokenizer = make_tiny_tokenizer(folder)
        tokenizer.chat_template = trial + "{% for message in messages %}{{ message.content }}{% endfor %}"
        self._real = Tokenizer(tokenizer, "test")

    def check_roles(self, roles: Sequence[object]) -> None:
        """Accepts every role."""

    def render_chat(self, messages: Sequence[dict[str, object]], **more: Any) -> str:
        return self._real.render_chat(messages, **more)


@pytest.mark.parametrize(
    ("trial", "what"), [(LOOPS, "took more than 2 s of processor time"), (BOMB, "exceeded its memory limit")]
)
def test_other_requests_are_served_meanwhile(tmp_path: Path, trial: str, what: str) -> None:
    with serve_echo(load_tokenizer=lambda _: TemplateTokenizer(tmp_path, trial)) as server:
        good = {"messages": [{"role": "user", "content": "a"}] * 2}
        assert server.http.post("/v1/chat/completions", json=good).json()["choices"][0]["message"]["content"] == "aa"
        hostile = server.send("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 1000})
        before, peak, longest = psutil.Process().memory_info().rss, 0, 0.0
        hostile.settimeout(0.02)
        answer = b""
        begin = time.monotonic()
        while b"}}" not in answer and time.monotonic() - begin < 60:
            asked = time.monotonic()
            assert server.http.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - asked)
            peak = max(peak, psutil.Process().memory_info().rss)
            try:
                answer += hostile.recv(65536)
            except TimeoutError:
                continue
        hostile.close()
        assert server.http.post("/v1/chat/completions", json=good).json()["choices"][0]["message"]["content"] == "aa"
    assert b"400 Bad Request" in answer
    assert f"the chat template {what} on 1000 messages, and was stopped".encode() in answer
    assert longest < 5
    assert peak - before < 64 << 20
