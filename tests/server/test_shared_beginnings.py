"""How the front end finds the prefix that conversations share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.echo_server import serve_echo

from sglang_jax.server.shared_beginnings import MAX_CHARACTERS, MAX_KEPT, MIN_CHARACTERS, SharedBeginnings

SYSTEM = "system: You are helpful. " * 8


class Encoder:
    """Encodes bytes; the last byte of a text and the first of the next may merge into one token."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return [*text[:-1].encode(), 1000 + ord(text[-1])]


def count(beginnings: SharedBeginnings, text: str, message: str, encode: Encoder) -> int:
    return asyncio.run(beginnings.count(text, message, list(text.encode()), encode))


def test_it_ends_at_the_first_message_and_at_a_token_boundary() -> None:
    encode, beginnings = Encoder(), SharedBeginnings()
    for message in ("hello", " what else? \n", "hello hello"):
        text = f"{SYSTEM}user: {message.strip()}\nassistant:"
        assert count(beginnings, text, message, encode) == len(f"{SYSTEM}user: ") - 1
    assert encode.asked == [f"{SYSTEM}user: "], "the same for all, so it is tokenized once"


@pytest.mark.parametrize("message", ["", "  ", "not there", "system:"])
def test_it_is_unknown_if_the_message_is_missing_or_comes_first(message: str) -> None:
    encode = Encoder()
    assert count(SharedBeginnings(), f"{SYSTEM}user: hello", message, encode) == 0
    assert not encode.asked


@pytest.mark.parametrize(("length", "counted"), [(MIN_CHARACTERS, True), (MIN_CHARACTERS - 1, False)])
def test_short_and_very_long_prefixes_are_skipped(length: int, counted: bool) -> None:
    assert (count(SharedBeginnings(), "a" * length + "hello", "hello", Encoder()) > 0) == counted
    long = "a" * (MAX_CHARACTERS + 1) + "hello"
    assert count(SharedBeginnings(), long, "hello", Encoder()) == 0


def test_the_number_of_remembered_prefixes_is_limited_lru() -> None:
    encode, beginnings = Encoder(), SharedBeginnings()

    def see(number: int) -> None:
        count(beginnings, f"{SYSTEM}{number:04} hello", "hello", encode)

    see(0)
    for number in range(1, MAX_KEPT + 1):
        see(number)
        see(0)
    assert len(encode.asked) == MAX_KEPT + 1
    see(1)
    assert len(encode.asked) == MAX_KEPT + 2, "the one that was used longest ago has gone"
    see(0)
    assert len(encode.asked) == MAX_KEPT + 2


@pytest.mark.parametrize(("model", "looks"), [("states", True), ("echo", False)])
def test_the_core_receives_the_end_of_a_chats_system_message(model: str, looks: bool) -> None:
    """For models with states. Not in a session, whose next turn starts where this one ends."""

    def chat(*contents: Any) -> dict[str, Any]:
        roles = ("system", "user", "assistant", "user")
        turns = zip(roles, contents, strict=False)
        return {"messages": [{"role": role, "content": content} for role, content in turns], "max_tokens": 1}

    long = "You are helpful. " * 10
    with serve_echo(model_path=model) as server:
        for body in (chat(long, "hi"), chat(long, "Why?", "So.", "Why?"), chat(long, [{"type": "text", "text": "hi"}])):
            assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        no_system = {"messages": [{"role": "user", "content": long * 2}], "max_tokens": 1}
        assert server.http.post("/v1/chat/completions", json=no_system).status_code == 200
        assert server.http.post("/v1/completions", json={"prompt": long, "max_tokens": 1}).status_code == 200
        told = [one["shared_len"] for one in server.seen()]
    assert told[0] == told[1] == told[2]
    assert told[3:] == [0, 0]
    assert (told[0] > len(long)) == looks
    assert looks or told[0] == 0
