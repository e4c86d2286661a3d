"""Roles of chat messages over HTTP, under chat templates of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import chat_templates
from helpers.chat_templates import byte_tokenizer
from helpers.echo_server import EchoServer, serve_echo

from sglang_jax.checkpoint.tokenizer import Tokenizer
from sglang_jax.config import EngineConfig

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with serve_echo(load_tokenizer=loader(tmp_path_factory.mktemp("gemma"), chat_templates.GEMMA)) as server:
        yield server


@pytest.fixture(scope="module")
def prints_any(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    with serve_echo(load_tokenizer=loader(tmp_path_factory.mktemp("any"), chat_templates.PRINTS_ANY)) as server:
        yield server


def loader(folder: Path, template: str) -> Any:
    def load(config: EngineConfig) -> Tokenizer:
        return byte_tokenizer(folder, template)

    return load


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def refusal(server: EchoServer, body: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    response = server.http.post(CHAT, json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_role_is_refused(prints_any: EchoServer, stream: bool) -> None:
    body = {"messages": messages(("user", "a"), ("assistant", "b"), ("alien", "c"))}
    assert refusal(prints_any, body, stream=stream) == {
        "message": "messages[2].role is 'alien', which the model's chat template does not support; supported: system, "
        "developer, user, assistant, tool, function",
        "type": "invalid_request_error",
        "param": "messages[2].role",
        "code": "invalid_value",
    }


def test_the_role_is_checked_before_the_other_fields(prints_any: EchoServer) -> None:
    assert refusal(prints_any, {"messages": [{"role": "alien"}]})["param"] == "messages[0].role"
    assert refusal(prints_any, {"messages": [{"role": "user"}]})["param"] == "messages[0].content"


def test_roles_are_checked_in_long_and_in_continued_conversations(prints_any: EchoServer) -> None:
    """Long ones are rendered in a thread."""
    long = {"messages": messages(("user", "a" * 3000), ("alien", "b"))}
    assert refusal(prints_any, long)["param"] == "messages[1].role"
    continued = {"messages": messages(("alien", "a"), ("assistant", "b")), "continue_final_message": True}
    assert refusal(prints_any, continued)["param"] == "messages[0].role"


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_roles_that_the_template_rejects_or_ignores_are_refused(gemma: EchoServer, role: str) -> None:
    error = refusal(gemma, {"messages": messages((role, "a"), ("user", "b"))})
    assert error["param"] == "messages[0].role"
    assert error["message"].endswith(
        f"is {role!r}, which the model's chat template does not support; supported: user, assistant"
    )


def test_only_the_template_checks_the_order_of_roles(gemma: EchoServer) -> None:
    error = refusal(gemma, {"messages": messages(("user", "a"), ("user", "b"))})
    assert error["param"] == "messages"
    assert error["message"] == (
        "the chat template refused the messages: Conversation roles must alternate user/assistant"
    )


def test_a_template_with_infinite_recursion_is_refused(tmp_path: Path) -> None:
    """The template fails to render; the server keeps serving."""
    with serve_echo(load_tokenizer=loader(tmp_path, chat_templates.RECURSES)) as server:
        assert refusal(server, {"messages": messages(("tool", "a"))})["param"] == "messages[0].role"
        error = refusal(server, {"messages": messages(("user", "loop"))})
        assert error["param"] == "messages"
        assert error["message"].startswith("the chat template refused the messages: maximum recursion")
        assert server.http.post(CHAT, json={"messages": messages(("user", "a"))}).status_code == 200


def test_known_roles_are_answered(gemma: EchoServer, prints_any: EchoServer) -> None:
    def echoed(server: EchoServer, *turns: tuple[str, str]) -> str:
        response = server.http.post(CHAT, json={"messages": messages(*turns)})
        assert response.status_code == 200, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    assert echoed(gemma, ("user", "a"), ("assistant", "b"), ("user", "c")) == "<user>a<model>b<user>c"
    turns = ("developer", "a"), ("tool", "b"), ("function", "c")
    assert echoed(prints_any, *turns) == "<system>a\n<tool>b\n<function>c\n"
