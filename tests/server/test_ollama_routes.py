"""Ollama's API, with an engine that echoes its prompt: tests choose its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.engine_fakes import CONTEXT_LENGTH

from sglang_jax.sampling import GenerationDefaults
from sglang_jax.server.ollama_schema import OllamaChatBody, OllamaOptions

CHAT, GENERATE = "/api/chat", "/api/generate"
GET = {"name": "get", "description": "Gets", "parameters": {"type": "object", "properties": {"key": {}}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "ä€😀"}}\n</tool_call>'
CUT = CALL.partition("€")[0]
TOTALS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


@pytest.fixture(scope="module")
def thinking() -> Iterator[EchoServer]:
    with serve_echo(model_path="echo:0.001", reasoning_parser="deepseek_r1") as server:
        yield server


def chat_of(says: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": says}], **fields}


def ask(server: EchoServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post(path, json={**body, "stream": False})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(server: EchoServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply that a client assembles from a stream's lines, which are the default."""
    response = server.http.post(path, json=body)
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    *parts, whole = map(json.loads, response.text.splitlines())
    assert [part.get("done") for part in parts] == [False] * len(parts)
    assert all(name not in part for part in parts for name in (*TOTALS, "done_reason"))
    if path == CHAT:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for part in parts:
            for name, value in part["message"].items():
                message[name] = value if name == "role" else message.get(name, type(value)()) + value
        assert whole["message"] == {"role": "assistant", "content": ""}
        whole["message"] = message
    else:
        whole["response"] += "".join(part["response"] for part in parts)
    if logprobs := [one for part in (*parts, whole) for one in part.get("logprobs", [])]:
        whole["logprobs"] = logprobs
    return whole


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without its times and the ids of its calls, after a check that its durations add up."""
    if answer["done_reason"] != "load":
        total, _, _, reading, _, writing = (answer[name] for name in TOTALS)
        assert abs(total - reading - writing) < 3
        assert writing >= 1
    for call in answer.get("message", {}).get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return {name: value for name, value in answer.items() if name != "created_at" and not name.endswith("_duration")}


def counts(read: int, written: int, reason: str = "stop") -> dict[str, Any]:
    return {"done": True, "done_reason": reason, "prompt_eval_count": read, "eval_count": written}


def message(content: str, **fields: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content, **fields}}


CALLED = [{"function": {"index": 0, "name": "get", "arguments": {"key": "ä€😀"}}}]
TOOLS = {"tools": [{"type": "function", "function": GET}]}
REPLIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, chat_of("hi"), message("user: hi\n") | counts(9, 10)),
    (CHAT, chat_of("hi", model="default:latest", keep_alive="5m"), message("user: hi\n") | counts(9, 10)),
    (CHAT, chat_of("one two", options={"stop": ["two"]}), message("user: one ") | counts(14, 13)),
    (CHAT, chat_of("one two", options={"num_predict": 9}), message("user: one") | counts(14, 9, "length")),
    (CHAT, chat_of("one two", options={"num_ctx": 20}), message("user: ") | counts(14, 6, "length")),
    (CHAT, chat_of("so", options={"num_predict": -1}), message("user: so\n") | counts(9, 10)),
    (CHAT, {"model": "default"}, message("") | {"done": True, "done_reason": "load"}),
    (GENERATE, {"model": "default", "prompt": "hi", "system": "be"}, {"response": "system: be\nuser: hi\n"}),
    (GENERATE, {"model": "default", "prompt": " hi ", "raw": True}, {"response": " hi "} | counts(4, 5)),
    (GENERATE, {"model": "default"}, {"response": "", "done": True, "done_reason": "load"}),
]


@pytest.mark.parametrize(("path", "body", "reply"), REPLIES)
def test_a_reply_and_its_stream(server: EchoServer, path: str, body: dict[str, Any], reply: dict[str, Any]) -> None:
    whole = without_times(ask(server, path, body))
    assert whole["model"] == body["model"]
    assert {**whole, **reply} == whole
    if whole["done_reason"] != "load":
        assert without_times(streamed(server, path, body)) == whole


def test_calls_come_whole_and_cut_ones_not_at_all(server: EchoServer) -> None:
    body = chat_of(f"so {CALL}", **TOOLS)
    whole = without_times(ask(server, CHAT, body))
    assert whole["message"]["tool_calls"] == CALLED
    assert whole["message"]["content"].strip() == "user: so"
    assert without_times(streamed(server, CHAT, body)) == whole
    strict = {
        "tools": [{"type": "function", "function": {**GET, "strict": True}}]
    }  # calls are certain from their names on
    cut = ask(server, CHAT, {**body, **strict, "options": {"num_predict": len(f"user: so {CUT}".encode())}})
    assert "tool_calls" not in cut["message"]
    assert "get" not in cut["message"]["content"]
    assert cut["done_reason"] == "length"


def test_thinking_is_separate_and_can_be_left_out(thinking: EchoServer) -> None:
    body = chat_of("hm</think>so")
    whole = without_times(ask(thinking, CHAT, {**body, "think": True}))
    assert whole["message"] == {"role": "assistant", "content": "so\n", "thinking": "user: hm"}
    assert without_times(streamed(thinking, CHAT, {**body, "think": "low"})) == whole
    assert ask(thinking, CHAT, {**body, "think": False})["message"] == {"role": "assistant", "content": "so\n"}
    prompt = {"model": "default", "prompt": "hm</think>so"}
    assert ask(thinking, GENERATE, prompt)["thinking"] == "user: hm"


@pytest.mark.parametrize("padding", ["", " " * 70_000], ids=["short", "long"])
def test_a_body_without_a_content_type_is_json(server: EchoServer, padding: str) -> None:
    body = json.dumps(chat_of("hi", stream=False)) + padding
    answer = server.http.post(CHAT, content=body)
    assert answer.json()["message"]["content"] == "user: hi\n"
    other = server.http.post(CHAT, content=body, headers={"Content-Type": "text/plain"})
    assert other.status_code == 415


def test_logprobs_are_in_each_part_once(server: EchoServer) -> None:
    body = chat_of("hi", logprobs=True, top_logprobs=2)
    whole = ask(server, CHAT, body)
    assert [entry["token"] for entry in whole["logprobs"]][:6] == list("user: ")
    assert {len(entry["top_logprobs"]) for entry in whole["logprobs"]} == {2}
    assert streamed(server, CHAT, body)["logprobs"] == whole["logprobs"]


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "top_k": 0, "top_p": 0.5, "min_p": 0.1}, {"top_k": -1, "top_p": 0.5, "min_p": 0.1}),
    ({"seed": -1, "num_predict": -2}, {"seed": None, "max_new_tokens": None, "temperature": 0.7}),
    ({"seed": 5, "num_predict": 7, "stop": "a"}, {"seed": 5, "max_new_tokens": 7, "stop": ("a",)}),
    ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
    ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
    ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ({"repeat_last_n": 64, "num_gpu": 99, "use_mmap": True, "mirostat": 0, "typical_p": 1.0}, {"min_p": 0.0}),
]


@pytest.mark.parametrize(("options", "meaning"), OPTIONS)
def test_options_have_the_meaning_of_sampling_parameters(options: dict[str, Any], meaning: dict[str, Any]) -> None:
    defaults = GenerationDefaults(temperature=0.7)
    sampling = OllamaOptions.model_validate(options).sampling(None, defaults)
    assert {name: getattr(sampling, name) for name in meaning} == meaning


def test_results_answer_calls_that_have_no_ids() -> None:
    called = [{"function": {"name": name, "arguments": {"key": name}}} for name in ("get", "put", "get")]
    result = [{"role": "tool", "tool_name": name, "content": text} for name, text in (("put", "1"), ("get", "2"))]
    body = OllamaChatBody.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "thinking": "hm", "tool_calls": called},
                *result,
                {"role": "tool", "content": "3"},
            ],
        }
    )
    _, said, *results = body.conversation()
    assert (said["content"], said["reasoning_content"]) == ("", "hm")
    ids = [call["id"] for call in said["tool_calls"]]  # type: ignore[attr-defined]
    assert len({*ids}) == 3
    assert results == [
        {"role": "tool", "content": "1", "tool_call_id": ids[1], "name": "put"},
        {"role": "tool", "content": "2", "tool_call_id": ids[0], "name": "get"},
        {"role": "tool", "content": "3", "tool_call_id": ids[2], "name": "get"},
    ]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": None}, "model"),
    (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["AA"]}]}, "images"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_name": "get"}]}, "messages[0].tool_name"),
    (CHAT, {"think": True}, "think"),
    (CHAT, {"format": "xml"}, "format"),
    (CHAT, {"format": 5}, "format"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"options": {"top_p": 7}}, "options.top_p"),
    (CHAT, {"options": {"num_predict": 0}}, "options.num_predict"),
    (CHAT, {"options": {"num_ctx": CONTEXT_LENGTH + 1}}, "options.num_ctx"),
    (CHAT, {"options": {"num_ctx": 8}}, "options.num_ctx"),
    (CHAT, {"options": {"mirostat": 2}}, "mirostat"),
    (CHAT, {"options": {"typical_p": 0.5}}, "typical_p"),
    (CHAT, {"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_last_n"),
    (GENERATE, {"suffix": "b"}, "suffix"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"context": [1]}, "context"),
    (GENERATE, {"raw": True, "system": "be"}, "system"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_refusals_have_ollamas_shape(server: EchoServer, path: str, fields: dict[str, Any], param: str) -> None:
    asked = {"model": "default", "prompt": "a"} if path == GENERATE else chat_of("a")
    for stream in (True, False):
        response = server.http.post(path, json={**asked, **fields, "stream": stream})
        assert response.status_code == 400, response.text
        answer = response.json()
        assert (answer["param"], type(answer["error"])) == (param, str)


def test_the_served_model_is_described_and_cannot_be_changed(server: EchoServer, thinking: EchoServer) -> None:
    [listed] = server.http.get("/api/tags").json()["models"]
    [running] = server.http.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == running["model"]
    assert running["context_length"] == CONTEXT_LENGTH
    for one, capabilities in ((server, ["completion", "tools"]), (thinking, ["completion", "tools", "thinking"])):
        shown = one.http.post("/api/show", json={"model": "default"}).json()
        assert shown["capabilities"] == capabilities
        assert shown["details"] == listed["details"]
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == CONTEXT_LENGTH
    assert server.http.get("/api/version").json()["version"].count(".") == 2
    assert server.http.post("/api/show", json={"model": "other"}).status_code == 404
    for path in ("pull", "push", "create", "copy", "delete", "blobs/sha256:0"):
        response = server.http.request("DELETE" if path == "delete" else "POST", f"/api/{path}", json={"model": "m"})
        assert response.status_code == 404
        assert "cannot change it" in response.json()["error"]
    assert "use POST /v1/embeddings" in server.http.post("/api/embed", json={}).json()["error"]
