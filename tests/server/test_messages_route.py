"""Anthropic's Messages API, with an engine that echoes its prompt: tests choose its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo

from sglang_jax.server.anthropic_schema import CountBody
from sglang_jax.server.volatile_system import SystemBlock, separate

PATH = "/v1/messages"
TOOL = {"name": "get", "description": "Gets", "input_schema": {"type": "object", "properties": {"key": {}}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "ä€😀"}}\n</tool_call>'
CACHED = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def thinking() -> Iterator[EchoServer]:
    with serve_echo(model_path="echo:0.001", reasoning_parser="deepseek_r1") as server:
        yield server


def body_of(says: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 1000, "messages": [{"role": "user", "content": says}], **fields}


def ask(server: EchoServer, body: Mapping[str, Any], path: str = PATH) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: EchoServer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a client assembles from a stream's events, whose order it checks."""
    response = server.http.post(PATH, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    message: dict[str, Any] = {}
    partial, open_blocks, names = "", 0, []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        names.append(event["type"])
        match event:
            case {"type": "message_start", "message": message}:
                assert (message["content"], message["stop_reason"]) == ([], None)
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert (index, open_blocks) == (len(message["content"]), 0)
                message["content"].append(block)
                partial, open_blocks = "", 1
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                kind = delta.pop("type")
                partial += delta.pop("partial_json", "")
                for field, text in delta.items():
                    assert kind == {"text": "text_delta"}.get(field, f"{field}_delta")
                    message["content"][index][field] += text
            case {"type": "content_block_stop", "index": index}:
                assert (index, open_blocks) == (len(message["content"]) - 1, 1)
                open_blocks = 0
                if partial:
                    message["content"][index]["input"] = json.loads(partial)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for block in (message, *message["content"]):
        block.pop("id", None)
    return message


ANSWERS: list[tuple[dict[str, Any], list[dict[str, Any]], str, str | None]] = [
    (body_of("hä"), [{"type": "text", "text": "user: hä\n"}], "end_turn", None),
    (body_of("one two", stop_sequences=["two"]), [{"type": "text", "text": "user: one "}], "stop_sequence", "two"),
    (body_of("one two", max_tokens=9), [{"type": "text", "text": "user: one"}], "max_tokens", None),
    (body_of("one", max_tokens=0), [], "max_tokens", None),
    (
        body_of(f"so {CALL}", tools=[TOOL]),
        [{"type": "text", "text": "user: so"}, {"type": "tool_use", "name": "get", "input": {"key": "ä€😀"}}],
        "tool_use",
        None,
    ),
    (
        body_of(CALL, tools=[TOOL], tool_choice={"type": "none"}),
        [{"type": "text", "text": f"user: {CALL}\n"}],
        "end_turn",
        None,
    ),
]


@pytest.mark.parametrize(("body", "content", "reason", "matched"), ANSWERS)
def test_a_reply_and_its_stream(
    server: EchoServer, body: dict[str, Any], content: list[dict[str, Any]], reason: str, matched: str | None
) -> None:
    whole = ask(server, body)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "default")
    streamed = stream(server, body)
    assert without_ids(streamed) == without_ids(whole)
    assert (whole["content"], whole["stop_reason"], whole["stop_sequence"]) == (content, reason, matched)


def test_thinking_comes_first_and_is_signed(thinking: EchoServer) -> None:
    body = body_of(f"hm</think>\n\nso {CALL}", tools=[TOOL])
    whole, streamed = without_ids(ask(thinking, body)), without_ids(stream(thinking, body))
    assert streamed == whole
    thought, text, call = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "user: hm")
    assert thought["signature"]
    assert (text["text"].strip(), call["input"], whole["stop_reason"]) == ("so", {"key": "ä€😀"}, "tool_use")
    hidden = ask(thinking, {**body, "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}})
    assert [block["type"] for block in hidden["content"]] == ["text", "tool_use"]


def test_usage_counts_the_cached_part_separately(server: EchoServer) -> None:
    body = body_of("a")
    usage = ask(server, body)["usage"]
    (counted,) = ask(server, {name: body[name] for name in ("model", "messages")}, f"{PATH}/count_tokens").values()
    assert usage["cache_read_input_tokens"] == 2  # what this engine reports
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted == len("user: a\n")


def prompt_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return CountBody.model_validate({"model": "m", **body}).conversation()


def test_blocks_become_messages_of_chat_templates() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get", "input": {"key": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]},
        {"type": "text", "text": "next"},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    found = prompt_of(
        {
            "system": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "be kind"}],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [document]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]},
                {"role": "user", "content": results},
                {"role": "system", "content": "now briefly"},
                {"role": "assistant", "content": "It"},
            ],
        }
    )
    call = {"id": "t1", "type": "function", "function": {"name": "get", "arguments": {"key": 1}}}
    assert found == [
        {"role": "system", "content": "be brief\nbe kind"},
        {"role": "user", "content": "a\nT\nd"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "name": "get", "content": "x"},
        {"role": "user", "content": "next\n<system-reminder>\nnow briefly\n</system-reminder>"},
        {"role": "assistant", "content": "It"},
    ]


def test_the_last_message_of_the_assistant_is_continued(server: EchoServer) -> None:
    body = body_of("a")
    body["messages"].append({"role": "assistant", "content": "b"})
    (block,) = ask(server, body)["content"]
    assert block["text"] == "user: a\nassistant: b"


IMAGE = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [{"role": "user", "content": "a"}, USE]}, "messages"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "get"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "put"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ({"temperature": -1}, "temperature"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals_have_anthropics_shape(server: EchoServer, fields: dict[str, Any], param: str) -> None:
    for more in ({}, {"stream": True}):
        response = server.http.post(PATH, json={**body_of("a"), **fields, **more})
        assert response.status_code == 400, response.text
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert answer["error"]["param"] == param


def test_other_errors_have_anthropics_shape(server: EchoServer) -> None:
    assert server.http.post(PATH, json=body_of("a", model="m")).json()["error"]["type"] == "not_found_error"
    assert server.http.post(f"{PATH}/batches", json={}).json()["error"]["type"] == "not_found_error"
    assert server.http.get(PATH).json()["type"] == "error"


def shared(first: str, second: str) -> int:
    return next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))


def test_what_changes_in_the_system_prompt_does_not_hide_the_conversation() -> None:
    """Thirty calls of an agent: a growing conversation behind a system prompt with a billing line, the time of day, a
    budget and an unmarked block, all new in each call."""
    calls, messages = [], []
    for turn in range(30):
        budgets = "\n".join(f"<total_tokens>{left} left</total_tokens>" for left in range(turn + 1))
        messages.append({"role": "user", "content": f"question {turn} " + "words " * 200})
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={turn:05x};"},
            {"type": "text", "text": "You help. " * 400 + f"\nToday's date: 2026-11-29\nCurrent time: 10:{turn:02}:00"},
            {"type": "text", "text": "Rules. " * 400, "cache_control": CACHED},
            {"type": "text", "text": f"open files: {turn}"},
            {"type": "text", "text": budgets},
        ]
        prompt = prompt_of({"system": system, "messages": messages})
        calls.append("".join(f"{message['role']}: {message['content']}\n" for message in prompt))
        assert f"open files: {turn}\n" in calls[-1]
        assert "Current time" not in calls[-1].split("question", maxsplit=1)[0]
        assert calls[-1].count("<total_tokens>") == 1
        assert calls[-1].count("cch=") == 0
        messages.append({"role": "assistant", "content": f"answer {turn} " + "words " * 20})
    could = sum(map(len, calls[:-1]))
    assert sum(shared(first, second) for first, second in pairwise(calls)) >= 0.95 * could


def test_only_what_tells_the_time_moves() -> None:
    stays = ["Today's date: 2026-11-29", "The shop opens at 10:30", "Ratio now: three", "- Timeouts are 10:00 long"]
    moves = [
        "Current time: 10:30",
        "  * The current local time is 9:05 PM",
        "Timestamp: 2026-11-29T10:30:00Z",
    ]
    found = separate([SystemBlock("\n".join([*stays, *moves]))])
    assert found.stable == ("\n".join(stays),)
    assert found.volatile == tuple(line.strip() for line in moves)
