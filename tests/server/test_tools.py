"""Tools and reasoning over HTTP, with an engine that echoes its prompt: tests choose its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo

from sglang_jax.replies.parser import Text
from sglang_jax.server.chat_replies import ReplyReader

CHAT = "/v1/chat/completions"
GET = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Gets a thing",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "ä€😀"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking() -> Iterator[EchoServer]:
    # A pause between steps: events that a client reads late arrive merged.
    with serve_echo(model_path="echo:0.001", reasoning_parser="deepseek_r1", max_tools_per_request=2) as server:
        yield server


def ask(server: EchoServer, says: str, **fields: Any) -> dict[str, Any]:
    """The first choice of the answer of a model that says `user: ` and this text."""
    response = server.http.post(CHAT, json={"messages": [{"role": "user", "content": says}], **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def stream(server: EchoServer, says: str, **fields: Any) -> dict[int, dict[str, Any]]:
    """The joined text of a stream's events, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in server.events(CHAT, {"messages": [{"role": "user", "content": says}], **fields}):
        for change in event["choices"]:
            said = choices.setdefault(
                change["index"],
                {"content": "", "reasoning": "", "calls": [], "reasons": [], "logprobs": [], "parts": 0},
            )
            delta = change["delta"]
            said["content"] += delta.get("content", "")
            said["reasoning"] += delta.get("reasoning_content", "")
            said["parts"] += "reasoning_content" in delta
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(said["calls"])
                    assert call["type"] == "function"
                    said["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                said["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            said["logprobs"] += (change.get("logprobs") or {"content": []})["content"]
            said["reasons"] += [change["finish_reason"]] if change["finish_reason"] else []
    return choices


def refusal(server: EchoServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    answers = [
        server.http.post(
            CHAT, content=json.dumps({**body, "stream": flag}), headers={"Content-Type": "application/json"}
        )
        for flag in (False, True)
    ]
    assert [answer.status_code for answer in answers] == [400, 400], answers[0].text
    errors = [answer.json()["error"] for answer in answers]
    assert errors[0] == errors[1]
    error: dict[str, Any] = errors[0]
    return error


def test_calls_are_separated_from_text(server: EchoServer) -> None:
    choice = ask(server, f"so\n{CALL}\n{SECOND}", tools=[GET, NOW])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "user: so"
    first, second = message["tool_calls"]
    assert first["id"] != second["id"]
    assert first["id"].startswith("call_")
    assert first["type"] == "function"
    assert first["function"]["name"] == "get"
    assert json.loads(first["function"]["arguments"]) == {"key": "ä€😀"}
    assert second["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 1}])
def test_a_stream_equals_the_whole_answer(server: EchoServer, fields: dict[str, Any]) -> None:
    says = f"so {CALL}{SECOND} then"
    body = {"messages": [{"role": "user", "content": says}], "tools": [GET, NOW], **fields}
    whole = server.http.post(CHAT, json=body).json()
    streamed = stream(server, says, tools=[GET, NOW], **fields)
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        said = streamed[choice["index"]]
        assert said["content"] == choice["message"]["content"]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in said["calls"]] == calls
        assert said["reasons"] == [choice["finish_reason"]] == ["tool_calls"]
        assert said["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
        assert len({call["id"] for call in said["calls"]}) == 2


def test_openais_stream_helper(server: EchoServer) -> None:
    strict: Any = {**GET, "function": {**GET["function"], "strict": True}}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="default", messages=[{"role": "user", "content": f"so {CALL}"}], tools=[strict]
        ) as stream,
    ):
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in events
    assert message.content == "user: so"
    [call] = message.tool_calls or []
    assert call.function.parsed_arguments == {"key": "ä€😀"}


def test_usage_counts_what_was_generated(server: EchoServer) -> None:
    body = {"messages": [{"role": "user", "content": CALL}], "stream_options": {"include_usage": True}}
    plain = server.http.post(CHAT, json={"messages": body["messages"]}).json()["usage"]
    assert server.http.post(CHAT, json={"messages": body["messages"], "tools": [GET]}).json()["usage"] == plain
    *_, last = server.events(CHAT, {**body, "tools": [GET]})
    assert (last["choices"], last["usage"]) == ([], plain)


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        ('<tool_call>\n{"name": "get", "arguments": {a}}\n</tool_call>', {}),
        (CALL.replace("get", "rm"), {}),
        (CALL, {"tool_choice": "none"}),
        (CALL, {"tools": []}),
    ],
)
def test_text_that_is_not_a_call_stays_text(server: EchoServer, says: str, fields: dict[str, Any]) -> None:
    choice = ask(server, says, **{"tools": [GET], **fields})
    assert choice["message"]["content"] == f"user: {says}\n"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert stream(server, says, **{"tools": [GET], **fields})[0]["content"] == f"user: {says}\n"


@pytest.mark.parametrize("escape", ["\\ud800", "\\ud83d", "\\ud83d\\ude00"])
def test_a_call_may_hold_a_lone_surrogate(server: EchoServer, escape: str) -> None:
    """Arguments written as a string with an escape for half a surrogate pair."""
    arguments = json.dumps('{"key": "ESCAPE"}').replace("ESCAPE", escape)
    says = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    [call] = ask(server, says, tools=[GET])["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"key": json.loads(f'"{escape}"')}
    assert stream(server, says, tools=[GET])[0]["calls"][0]["arguments"] == call["function"]["arguments"]


def test_an_exception_within_a_stream_is_an_event(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(reader: ReplyReader, text: str, *, finished: bool) -> list[Any]:
        if finished or "x" in text:
            raise ArithmeticError("planted")
        return [Text(text)] if text else []

    monkeypatch.setattr(ReplyReader, "read", fails)
    body = {"messages": [{"role": "user", "content": "aaaaaaaaaaaaaax"}], "tools": [GET], "stream": True}
    *_, last = [line for line in server.http.post(CHAT, json=body).text.split("\n") if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "ArithmeticError" in error["message"]


def test_a_truncated_call_is_text_with_reason_length(server: EchoServer) -> None:
    choice = ask(server, CALL, tools=[GET], max_tokens=40)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", f"user: {CALL}".encode()[:40].decode())


@pytest.mark.parametrize("left", [1, 5, len("</tool_call>")])
def test_a_call_truncated_in_its_closing_tag_is_a_call(server: EchoServer, left: int) -> None:
    most = len(f"user: {CALL}".encode()) - left
    choice, streamed = (read(server, CALL, tools=[GET], max_tokens=most) for read in (ask, stream))
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"key": "ä€😀"}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "user:")
    said = streamed[0]
    assert (said["reasons"], said["content"]) == (["length"], "user:")
    assert [one["arguments"] for one in said["calls"]] == [call["function"]["arguments"]]


def test_stop_strings_end_a_reply_before_and_within_calls(server: EchoServer) -> None:
    choice = ask(server, f"one two {CALL}", tools=[GET], stop=["two"])
    assert (choice["message"]["content"], choice["matched_stop"]) == ("user: one ", "two")
    choice = ask(server, f"one {CALL}", tools=[GET], stop=["key"])
    assert choice["message"]["content"] == 'user: one <tool_call>\n{"name": "get", "arguments": {"'
    choice = ask(server, f"one {CALL} two", tools=[GET], stop=["two"])
    assert (choice["finish_reason"], choice["matched_stop"]) == ("tool_calls", "two")


def test_a_truncated_enforced_call(server: EchoServer) -> None:
    """The part that was sent stays, whole and in streams, and the finish reason is not `tool_calls`."""
    fields: dict[str, Any] = {"tools": [{**GET, "function": {**GET["function"], "strict": True}}]}
    for more, reason in (({"stop": ['"}']}, "stop"), ({"max_tokens": 58}, "length")):
        choice = ask(server, CALL.replace("ä€😀", "abcdef"), **fields, **more)
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith('{"key": "ab')
        assert choice["finish_reason"] == reason
        said = stream(server, CALL.replace("ä€😀", "abcdef"), **fields, **more)[0]
        assert (said["calls"][0]["arguments"], said["reasons"]) == (call["function"]["arguments"], [reason])


def test_parallel_tool_calls_false_and_allowed_tools(server: EchoServer) -> None:
    says = CALL + SECOND
    choice = ask(server, says, tools=[GET, NOW], parallel_tool_calls=False)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get"]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = ask(server, says, tools=[GET, NOW], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def with_schema(schema: Any) -> dict[str, Any]:
    return {"tools": [NOW, tool(parameters={"type": "object", "properties": {"a": schema}})]}


FORCED = {"type": "function", "function": {"name": "rm"}}
AT = "tools[1].function.parameters.properties.a"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function, got 'web_search'"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type", "must be function, got 'mcp'"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type", "must be function"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name", "got 'a b'"),
    ({"tools": [tool(name="")]}, "tools[0].function.name", "got ''"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name", "which another tool already has"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "dict"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type", "must be object"),
    (with_schema({"type": "intger"}), f"{AT}.type", "got 'intger'"),
    (with_schema({"items": {"type": ["string", "nul"]}}), f"{AT}.items.type", "got 'nul'"),
    (with_schema({"anyOf": [True, 5]}), f"{AT}.anyOf[1]", "must be a JSON schema"),
    (with_schema({"required": "a"}), f"{AT}.required", "must be a list of names"),
    (with_schema({"enum": {}}), f"{AT}.enum", "must be a list"),
    ({"tools": [NOW] * 129}, "tools", "at most 128 tools (--max-tools-per-request), got 129"),
    ({"tools": [tool(description="x" * 140_000)]}, "tools", "the limit is 131072"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice", "got 'always'"),
    ({"tools": [NOW], "tool_choice": FORCED}, "tool_choice.function.name", "not one of the tools: now"),
    ({"tool_choice": "required"}, "tool_choice", "the request has no tools"),
    (
        {"tools": [NOW], "tool_choice": "required", "regex": "a"},
        "regex",
        "and regex another format",
    ),
    ({"tools": "now"}, "tools", "list"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "clients cannot set"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs", "'eos_token'"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "'a b'"),
    ({"chat_template_kwargs": {f"v{i}": i for i in range(33)}}, "chat_template_kwargs", "at most 32"),
    ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning", "give only one of them"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "chat template"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_a_bad_tool_field_is_a_400_that_names_the_place(
    server: EchoServer, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(server, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


def calls(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "c1", "type": "function", "function": {"name": "get", "arguments": arguments}}]


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        ({"role": "assistant", "tool_calls": calls("{a}")}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": calls("[1]")}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "user", "content": "b", "tool_calls": calls("{}")}, "messages[1].tool_calls"),
        ({"role": "tool"}, "messages[1].content"),
    ],
)
def test_impossible_tool_messages_are_refused(server: EchoServer, turn: dict[str, Any], param: str) -> None:
    error = refusal(server, messages=[{"role": "user", "content": "a"}, turn])
    assert error["param"] == param


def test_tool_messages_are_rendered(server: EchoServer) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls("")},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]
    choice = server.http.post(CHAT, json={"messages": turns, "tools": [GET]}).json()["choices"][0]
    assert choice["message"]["content"] == "user: a\nassistant: \ntool: 7\n"


def test_chat_template_kwargs_reach_the_template(server: EchoServer) -> None:
    choice = ask(server, "hi", chat_template_kwargs={"mood": "mild", "enable_thinking": False})
    assert choice["message"]["content"] == "mood=mild\nenable_thinking=False\nuser: hi\n"


def test_reasoning_is_separated_from_the_answer(thinking: EchoServer) -> None:
    says = f"well\n</think>\n\nIt is so. {CALL}"
    choice = ask(thinking, says, tools=[GET])
    assert choice["message"]["reasoning_content"] == "user: well"
    assert choice["message"]["content"] == "It is so."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get"
    said = stream(thinking, says, tools=[GET])[0]
    assert (said["reasoning"], said["content"]) == ("user: well", "It is so.")
    said = stream(thinking, f"{'well, ' * 60}\n</think>It is so.")[0]
    assert (said["reasoning"], said["content"]) == (f"user: {'well, ' * 60}".rstrip(), "It is so.\n")
    assert said["parts"] > 2
    assert stream(thinking, says, stream_reasoning=False)[0]["parts"] == 1
    assert stream(thinking, "never over", stream_reasoning=False)[0]["reasoning"] == "user: never over"


def test_reasoning_can_be_left_out(thinking: EchoServer) -> None:
    says = f"well\n</think>\n\nIt is so. {CALL}"
    choice = ask(thinking, says, tools=[GET], include_reasoning=False)
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == "It is so."
    said = stream(thinking, says, tools=[GET], include_reasoning=False)[0]
    assert (said["reasoning"], said["content"], len(said["calls"])) == ("", "It is so.", 1)
    assert ask(thinking, says, include_reasoning=True)["message"]["reasoning_content"] == "user: well"


def test_reasoning_can_stay_in_the_text(thinking: EchoServer) -> None:
    says = f"well {CALL}\n</think>\n\nSo. {CALL}"
    choice = ask(thinking, says, tools=[GET], separate_reasoning=False)
    assert choice["message"]["content"] == f"user: well {CALL}\n</think>\n\nSo."
    assert len(choice["message"]["tool_calls"]) == 1
    assert "reasoning_content" not in choice["message"]


def test_a_continued_answer_has_no_reasoning(thinking: EchoServer) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"messages": turns, "continue_final_message": True}
    choice = thinking.http.post(CHAT, json=body).json()["choices"][0]
    assert (choice["message"]["content"], "reasoning_content" in choice["message"]) == ("user: a\nassistant: b", False)


def test_a_flag_limits_the_number_of_tools(thinking: EchoServer) -> None:
    assert "--max-tools-per-request" in refusal(thinking, tools=[GET, NOW, tool()])["message"]


def test_a_server_without_a_tool_parser() -> None:
    with serve_echo(tool_call_parser="none") as server:
        error = refusal(server, tools=[GET])
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert ask(server, "a", tools=[GET], tool_choice="none")["message"]["content"] == "user: a\n"


def test_only_the_parser_sees_special_tokens() -> None:
    """Token 258 stands for `[TOOL_CALLS]` here: left out of the text, but the start of a call."""
    from helpers.engine_fakes import EOS, ByteDecoder, ByteTokenizer

    class Mistral(ByteTokenizer):
        special_tokens = {"[TOOL_CALLS]": 1, "[ARGS]": 2, "<eos>": EOS}  # noqa: RUF012

        def stream_decoder(self, skip_special_tokens: bool = True, **more: Any) -> Any:
            shown = more["markers"] if skip_special_tokens else {1, 2}

            class Decoder(ByteDecoder):
                def push(self, token_id: int) -> str:
                    if token_id in (1, 2):
                        return {1: "[TOOL_CALLS]", 2: "[ARGS]"}[token_id] if token_id in shown else ""
                    return super().push(token_id)

            return Decoder(skip_special_tokens)

    with serve_echo(load_tokenizer=lambda _: Mistral(), tool_call_parser="mistral") as server:
        says = 'so\x01get\x02{"key": "a"}'
        choice = ask(server, says, tools=[GET], stop=["[T"])
        [call] = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], call["function"]["name"]) == ("user: so", "get")
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
        assert ask(server, "so\x01rm\x02{}", tools=[GET])["message"]["content"] == "user: sorm{}\n"
        assert ask(server, "so\x01rm\x02{}")["message"]["content"] == "user: sorm{}\n"
        shown = ask(server, "so\x01rm\x02{}", tools=[GET], skip_special_tokens=False)["message"]["content"]
        assert shown == "user: so[TOOL_CALLS]rm[ARGS]{}\n"
