"""Limits that an operator sets are enforced, and the error names the flag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import load_fake_model
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.config import ServerConfig
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.errors import RequestError
from sglang_jax.sampling.grammar import MAX_GRAMMAR_CHARACTERS
from sglang_jax.sampling.params import MAX_STOP_CHARACTERS

OPTIONS: dict[str, Any] = {
    "max_stop_characters": 8,
    "max_grammar_characters": 20,
    "max_json_depth": 10,
    "max_logprobs_per_response": 100,
    "max_unread_bytes": 12345,
}


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with serve_echo(load_fake_model, **OPTIONS) as server:
        yield server


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


SCORED = {"prompt": "a" * 24, "logprobs": 3, "max_tokens": 1, "echo": True}


@pytest.mark.parametrize(
    ("path", "within", "beyond", "words"),
    [
        (
            "/v1/completions",
            {"stop": ["abcd", "efgh"]},
            {"stop": ["abcd", "efghi"]},
            "at most 8 characters together (--m",
        ),
        ("/generate", {}, {"sampling_params": {"stop": "abcdefghi"}}, "(--max-stop-characters), got 9"),
        ("/v1/completions", {}, {"guided_regex": "a" * 21}, "guided_regex has 21 characters, the limit is 20 (--max-g"),
        (
            "/v1/completions",
            {"metadata": {}},
            {"prompt": nested(11)},
            "levels of nesting; the limit is 10 (--max-json-d",
        ),
        ("/v1/completions", SCORED, {**SCORED, "n": 2}, "100 logprobs, the limit of one response (--max-logprobs-p"),
    ],
)
def test_a_flag_sets_each_limit(server: EchoServer, path: str, within: Any, beyond: Any, words: str) -> None:
    prompt = {"text": "a"} if path == "/generate" else {"prompt": "a", "max_tokens": 2}
    good = server.http.post(path, json={**prompt, **within})
    assert good.status_code == 200, good.text
    for stream in (False, True) if "logprobs" not in beyond else (False,):
        bad = server.http.post(path, json={**prompt, **beyond, "stream": stream})
        assert bad.status_code == 400, bad.text
        assert words in bad.json()["error"]["message"]


def test_a_flag_sets_the_limit_on_unread_output(server: EchoServer) -> None:
    links: Any = server.context.client
    assert links.links._link._max_unread_bytes == OPTIONS["max_unread_bytes"]


def test_a_flag_sets_the_time_limit_of_templates(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    endless = "{% for b in range(99999) %}" * 4 + "{% endfor %}" * 4
    endless = "{% if messages[0].content == 'stuck' %}" + endless + "{% endif %}"
    config = ServerConfig(model_path=str(folder), chat_template=endless, template_timeout=0.1)
    tokenizer = load_text_tokenizer(config)
    with pytest.raises(RequestError, match=r"took more than 0\.1 s of processor time"):
        tokenizer.render_chat([{"role": "user", "content": "stuck"}])


def test_flags_cannot_exceed_the_fixed_limits() -> None:
    for name, most in (
        ("max_stop_characters", MAX_STOP_CHARACTERS),
        ("max_grammar_characters", MAX_GRAMMAR_CHARACTERS),
    ):
        assert ServerConfig(**{name: most})
        with pytest.raises(ValueError, match=f"less than or equal to {most}"):
            ServerConfig(**{name: most + 1})
