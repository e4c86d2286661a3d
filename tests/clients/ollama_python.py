"""Ollama's Python client: chats, completions, tools, schemas, thinking, and what it asks about models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ollama
from checks import CAPITAL, KEY, MODEL, NO_SUCH_MODEL, QUESTION, URL, WEATHER, check, is_weather, main, raised

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
CHAT = [{"role": "user", "content": CAPITAL}]
GREEDY = {"temperature": 0, "num_predict": 24}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}}


def is_complete(answer: Any) -> None:
    assert answer.done
    assert answer.done_reason in ("stop", "length")
    assert answer.eval_count > 0
    assert answer.prompt_eval_count > 0
    assert answer.total_duration >= answer.eval_duration > 0


@check
def chat() -> None:
    answer = client.chat(MODEL, CHAT, options=GREEDY, keep_alive="5m")
    assert answer.message.role == "assistant"
    assert answer.message.content
    is_complete(answer)


@check
def chat_stream() -> None:
    whole = client.chat(MODEL, CHAT, options=GREEDY)
    parts = list(client.chat(MODEL, CHAT, options=GREEDY, stream=True))
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    is_complete(parts[-1])
    assert parts[-1].eval_count == whole.eval_count


@check
def chat_limit() -> None:
    answer = client.chat(MODEL, [{"role": "user", "content": "Count to 90."}], options={"num_predict": 4})
    assert (answer.done_reason, answer.eval_count) == ("length", 4)


@check
def chat_logprobs() -> None:
    answer = client.chat(MODEL, CHAT, options={"num_predict": 4}, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs or ()) for entry in answer.logprobs or ()] == [2] * 4


@check
def generate() -> None:
    answer = client.generate(MODEL, CAPITAL, system="Be brief.", options=GREEDY)
    assert answer.response
    is_complete(answer)
    parts = list(client.generate(MODEL, CAPITAL, system="Be brief.", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == answer.response


@check
def generate_raw() -> None:
    assert client.generate(MODEL, "One, two,", raw=True, options={"num_predict": 4, "temperature": 0}).response


@check
def tools() -> None:
    """The model decides whether it calls; an earlier call and its result are accepted whatever it does."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}
    talk: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "3 sunny days"},
    ]
    answer = client.chat(MODEL, talk, tools=[TOOL], options=GREEDY)
    assert answer.message.content or answer.message.tool_calls


@check
def structured() -> None:
    is_weather(client.chat(MODEL, [{"role": "user", "content": QUESTION}], format=WEATHER).message.content)
    is_weather(client.generate(MODEL, QUESTION, format=WEATHER).response)


@check
def thinking() -> None:
    """The chat template of this test starts a reply within its thinking, where the embedded model stays."""
    parts = list(client.chat(MODEL, CHAT, think=True, options=GREEDY, stream=True))
    assert "".join(part.message.thinking or "" for part in parts)
    assert not "".join(part.message.content or "" for part in parts)
    assert client.chat(MODEL, CHAT, think=False, options=GREEDY).message.content


@check
def models() -> None:
    [model] = client.list().models
    assert model.model == MODEL
    shown = client.show(MODEL)
    assert shown.capabilities is not None
    assert {"completion", "tools"} <= {*shown.capabilities}
    assert shown.details is not None
    [running] = client.ps().models
    assert running.model == MODEL
    assert running.context_length is not None


@check
def errors() -> None:
    asked: list[tuple[int, Callable[[], object]]] = [
        (404, lambda: client.chat(NO_SUCH_MODEL, CHAT)),
        (400, lambda: client.chat(MODEL, CHAT, options={"top_p": 7})),
        (400, lambda: list(client.chat(MODEL, CHAT, options={"top_p": 7}, stream=True))),
        (400, lambda: client.chat(MODEL, CHAT, options={"mirostat": 2})),
    ]
    for status, ask in asked:
        error = raised(ollama.ResponseError, ask)
        assert error.status_code == status, error
        assert isinstance(error.error, str), error.error


@check
def models_are_not_changed() -> None:
    for ask in (
        lambda: client.pull(MODEL),
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "another"),
        lambda: client.create("another", from_=MODEL),
        lambda: client.push(MODEL),
        lambda: client.embed(MODEL, "a text"),
    ):
        error = raised(ollama.ResponseError, ask)
        assert 400 <= error.status_code < 500, error
        assert isinstance(error.error, str), error.error


main()
