"""No client can ask for so much that the others notice: every limit, the error that names it, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.echo_server import EchoServer
from helpers.engine_fakes import CONTEXT_LENGTH, ByteTokenizer

MOST_CHARACTERS = CONTEXT_LENGTH * ByteTokenizer.longest_token


def error_of(server: EchoServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/generate", "text", {"text": "a" * (MOST_CHARACTERS + 1)}),
        ("/v1/completions", "prompt", {"prompt": ["a", "a" * (MOST_CHARACTERS + 1)]}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": "a" * MOST_CHARACTERS}]}),
        ("/tokenize", "prompt", {"prompt": ["a", "a" * (MOST_CHARACTERS + 1)]}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str, body: Any
) -> None:
    tokenized: list[int] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    error = error_of(server, path, body)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"characters; the limit is {MOST_CHARACTERS}" in error["message"]
    assert "--context-length" in error["message"]
    assert max(tokenized, default=0) <= 1


def test_a_text_of_as_many_characters_as_can_fit(server: EchoServer) -> None:
    response = server.http.post("/tokenize", json={"prompt": "a" * MOST_CHARACTERS})
    assert response.json()["count"] == MOST_CHARACTERS


def test_too_many_token_ids_are_counted_before_they_are_looked_at(server: EchoServer) -> None:
    error = error_of(server, "/generate", {"input_ids": [-1] * (CONTEXT_LENGTH + 1)})
    assert error["code"] == "context_length_exceeded"
