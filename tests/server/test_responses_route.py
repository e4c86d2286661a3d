"""OpenAI's Responses API, with an engine that echoes its prompt: tests choose its replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from sglang_jax.errors import ConfigError
from sglang_jax.server.errors import ResponseNotFoundError, StorageError
from sglang_jax.server.responses_items import messages_of
from sglang_jax.server.responses_store import ResponseStore, StoredResponse

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get", "description": "Gets", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "ä€😀"}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def thinking() -> Iterator[EchoServer]:
    with serve_echo(model_path="echo:0.001", reasoning_parser="deepseek_r1") as server:
        yield server


def ask(server: EchoServer, says: Any, **fields: Any) -> dict[str, Any]:
    response = server.http.post(PATH, json={"input": says, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer)
    return answer


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is one of the API's, in order of their numbers."""
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(events)))
    return events


def stream(server: EchoServer, says: Any, **fields: Any) -> dict[str, Any]:
    """The response that a client assembles from a stream's parts, which equals the one in its last event."""
    events = events_of(server.http.post(PATH, json={"input": says, "stream": True, **fields}).text)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    grown: dict[int, str] = {}
    for event in events[2:-1]:
        place = event["output_index"]
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert place == len(items)
            items.append(event["item"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[place]["id"]
            grown[place] = grown.get(place, "") + event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert grown.get(place, "") == event.get("text", event.get("arguments"))
        elif kind == "output_item.done":
            items[place] = event["item"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    answer: dict[str, Any] = last["response"]
    return answer


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two runs."""
    for name in ("id", "created_at", "completed_at"):
        response.pop(name)
    for item in response["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return response


ANSWERS: list[tuple[str, dict[str, Any], list[tuple[str, str]], str]] = [
    ("hä", {}, [("message", "user: hä\n")], "completed"),
    ("hä", {"instructions": "brief"}, [("message", "system: brief\nuser: hä\n")], "completed"),
    ("one two", {"max_output_tokens": 9}, [("message", "user: one")], "incomplete"),
    (f"so {CALL}", {"tools": [TOOL]}, [("message", "user: so"), ("function_call", '{"key": "ä€😀"}')], "completed"),
    (CALL, {"tools": [TOOL], "tool_choice": "none"}, [("message", f"user: {CALL}\n")], "completed"),
]


@pytest.mark.parametrize(("says", "fields", "output", "status"), ANSWERS)
def test_a_response_and_its_stream(
    server: EchoServer, says: str, fields: dict[str, Any], output: list[tuple[str, str]], status: str
) -> None:
    whole = ask(server, says, **fields)
    assert alike(stream(server, says, **fields)) == alike({**whole})
    found = [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in whole["output"]
    ]
    assert (found, whole["status"]) == (output, status)
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert whole["output"][-1]["status"] == status


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item(thinking: EchoServer, summary: str | None) -> None:
    fields = {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    says = f"hm</think>\n\nso {CALL}"
    whole = ask(thinking, says, **fields)
    thought, text, call = whole["output"]
    where, kind = ("summary", "summary_text") if summary else ("content", "reasoning_text")
    assert thought[where] == [{"type": kind, "text": "user: hm"}]
    assert (text["content"][0]["text"].strip(), call["name"]) == ("so", "get")
    usage = whole["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"] / 2
    assert alike(stream(thinking, says, **fields)) == alike(whole)
    # A client that stores nothing sends the reasoning back as it was encoded.
    back = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": thought["encrypted_content"]}
    (message,) = messages_of([], [back, {"type": "message", "role": "assistant", "content": "so"}], None)
    assert message == {"role": "assistant", "content": "so", "reasoning_content": "user: hm"}


def test_logprobs(server: EchoServer) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = ask(server, "ab", **fields)
    found = whole["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in found).removesuffix("<256>") == "user: ab\n"
    assert stream(server, "ab", **fields)["output"][0]["content"][0]["logprobs"] == found


def test_logprobs_of_a_reply_with_reasoning(thinking: EchoServer) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    for answer in (ask, stream):
        text = answer(thinking, "hm</think>\n\nso", **fields)["output"][1]["content"][0]
        assert "".join(one["token"] for one in text["logprobs"]).removesuffix("<256>").endswith("so\n")


def test_a_conversation_is_stored(server: EchoServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="default", input="a", metadata={"k": "v"}, instructions="not carried on")
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(model="default", input="b", previous_response_id=first.id)
        said = first.output_text.replace("\n", " ").strip()
        assert second.output_text.replace("\n", " ").strip() == f"user: a assistant: {said}  user: b"
        items = client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.type for item in items] == ["message"] * 3  # of two pages
        page = server.http.get(f"{PATH}/{second.id}/input_items").json()
        ResponseItemList.model_validate(page)
        assert [item["role"] for item in page["data"]] == ["user", "assistant", "user"]
        # References to items of stored responses stand for the items.
        reference = [{"type": "item_reference", "id": one.id} for one in items]
        twice = client.responses.create(model="default", input=reference * 2)  # type: ignore[arg-type]
        assert len(list(client.responses.input_items.list(twice.id, limit=1))) <= 2 * len(reference)
        by_reference = client.responses.create(model="default", input=reference, store=False)  # type: ignore[arg-type]
        assert by_reference.output_text == second.output_text
        client.responses.delete(first.id)
        for wanted in (first.id, by_reference.id, "resp_none"):
            with pytest.raises(openai.NotFoundError, match="there is no stored response"):
                client.responses.retrieve(wanted)
        with pytest.raises(openai.NotFoundError, match="there is no stored response"):
            client.responses.create(model="default", input="c", previous_response_id=second.id)


def test_calls_and_their_outputs_are_part_of_the_conversation(server: EchoServer) -> None:
    first = ask(server, CALL, tools=[TOOL])
    (*_, call) = first["output"]
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "found"}]
    second = ask(server, output, tools=[TOOL], previous_response_id=first["id"])
    assert second["output"][-1]["content"][0]["text"].endswith("tool: found")


def test_a_response_in_the_background(slow_server: EchoServer) -> None:
    with openai.OpenAI(base_url=f"{slow_server.url}/v1", api_key="none", max_retries=0) as client:
        begun = client.responses.create(model="default", input="a", background=True)
        assert begun.status == "queued"
        with pytest.raises(openai.BadRequestError, match="wait for"):
            client.responses.create(model="default", input="b", previous_response_id=begun.id)
        events = list(client.responses.create(model="default", input="abc", background=True, stream=True))
        run = events[-1].response  # type: ignore[union-attr]
        assert (run.status, run.output_text) == ("completed", "user: abc\n")
        assert client.responses.retrieve(run.id).output_text == "user: abc\n"
        again = events_of(slow_server.http.get(f"{PATH}/{run.id}?stream=true&starting_after=3").text)
        assert again == [json.loads(event.to_json()) for event in events[4:]]
        nothing = slow_server.http.get(f"{PATH}/{run.id}?stream=true&starting_after={len(events) - 1}")
        assert (nothing.status_code, nothing.text) == (200, "")
        assert client.responses.retrieve(begun.id).status == "completed"
        # A cancelled one ends at once, in the engine too.
        long = client.responses.create(model="default", input="x" * 3000, background=True)
        while not client.responses.retrieve(long.id).output:
            pass
        assert client.responses.retrieve(long.id).status == "in_progress"
        cancelled = client.responses.cancel(long.id)
        assert (cancelled.status, cancelled.output[-1].status) == ("cancelled", "incomplete")  # type: ignore[union-attr]
        assert client.responses.retrieve(long.id).status == "cancelled"
        assert slow_server.context.in_flight == {}
        with pytest.raises(openai.BadRequestError, match="does not run in the background"):
            client.responses.cancel(client.responses.create(model="default", input="a").id)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "web_search_call", "id": "a", "status": "completed"}]}, "input[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "?"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function", "name": "rm"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True, "store": False}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"temperature": -1}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals_name_the_field(server: EchoServer, fields: dict[str, Any], param: str) -> None:
    for more in ({}, {"stream": True}):
        response = server.http.post(PATH, json={"input": "a", **fields, **more})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_stored_item_has_only_what_is_read(server: EchoServer) -> None:
    """Else a few bytes, which refer to an item many times, would make the server copy megabytes each time."""
    part = {"type": "input_text", "text": "x" * 2000, "padding": "x" * 100_000}
    padded = {"role": "user", "content": [part], "padding": "x" * 100_000}
    response_id = ask(server, [padded])["id"]
    (item,) = server.http.get(f"{PATH}/{response_id}/input_items").json()["data"]
    text = {"type": "input_text", "text": "x" * 2000}
    assert item == {"type": "message", "role": "user", "content": [text], "id": item["id"], "status": "completed"}
    many = [{"type": "item_reference", "id": item["id"]}] * (server.context.config.max_body_bytes // 2000)
    for refused, message in (
        (many, "the items that input refers to have more than 8388608 bytes"),
        ([{"type": "item_reference", "id": f"{item['id']}9"}], "input[0].id is an item that no stored response has"),
    ):
        error = server.http.post(PATH, json={"input": refused}).json()["error"]
        assert message in error["message"]


def test_a_reply_that_ends_within_a_call_can_be_followed(server: EchoServer) -> None:
    says = {"tools": [{**TOOL, "strict": True}], "tool_choice": "required", "max_output_tokens": 60}
    first = ask(server, CALL, **says)
    assert first["output"][-1]["type"] == "function_call"
    assert first["output"][-1]["status"] == "incomplete"
    ask(server, "b", previous_response_id=first["id"])


def test_truncation_drops_the_first_exchanges(server: EchoServer) -> None:
    said = [{"role": "user", "content": f"{number} " + "x" * 500} for number in range(12)]
    refused = server.http.post(PATH, json={"input": said})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    items = [{"role": "developer", "content": "stays"}, *said]
    text = ask(server, items, truncation="auto", max_output_tokens=30)["output"][0]["content"][0]["text"]
    assert text.startswith("developer: stays\nuser: ")
    assert 4 < int(text.removeprefix("developer: stays\nuser: ").split()[0]) < 11


def stored(number: int, owner: str = "a", size: int = 0, status: str = "completed") -> StoredResponse:
    previous = f"r{number - 1}" if number else None
    text = json.dumps({"output": [], "status": status, "pad": "x" * size}).encode()
    return StoredResponse(f"r{number}", owner, previous, status, None, b"[]", text)


async def test_the_store_is_bounded_and_outlives_the_server(tmp_path: Path) -> None:
    now = 0.0
    limits: dict[str, Any] = {"most": 4, "most_bytes": 2000, "seconds": 100.0, "clock": lambda: now}
    store = ResponseStore(tmp_path / "responses.db", **limits)
    for number in range(4):
        await store.save(stored(number))
    assert [one.id for one in await store.conversation("r2", "a")] == ["r0", "r1", "r2"]
    with pytest.raises(ResponseNotFoundError):
        await store.find("r2", "b")
    # The newest of those used least recently goes first: what a conversation begins with is kept for the others.
    await store.save(stored(0, owner="a", status="queued"))
    await store.save(StoredResponse("b1", "b", None, "completed", None, b"[]", b'{"output": []}'))
    with pytest.raises(ResponseNotFoundError):
        await store.find("r3", "a")
    with pytest.raises(ConfigError, match="another process uses it"):
        ResponseStore(tmp_path / "responses.db", **limits)
    store.close()
    again = ResponseStore(tmp_path / "responses.db", **limits)
    assert (await again.find("r0", "a")).status == "failed"  # it ran when the server ended
    # The owner with the most bytes makes room.
    await again.save(StoredResponse("b2", "b", None, "completed", None, b"[]", b"x" * 1700))
    await again.save(StoredResponse("b3", "b", None, "completed", None, b"[]", b"x" * 1700))
    assert (await again.find("b3", "b")).id == "b3"
    assert (await again.find("r1", "a")).id == "r1"
    # So does the one with the most responses.
    for number in range(2, 7):
        await again.save(stored(number))
    assert (await again.find("b3", "b")).id == "b3"
    now = 101.0
    with pytest.raises(ResponseNotFoundError):
        await again.find("r1", "a")
    (tmp_path / "no database").write_bytes(b"x" * 4096)
    for name in ("no database", "no folder/responses.db"):
        with pytest.raises(ConfigError, match="cannot be used"):
            ResponseStore(tmp_path / name, **limits)


async def test_a_disk_that_is_full_loses_no_response() -> None:
    store = ResponseStore(None, most=4, most_bytes=10**6, seconds=100.0)
    await store.save(stored(0, status="queued"))
    await store._run(lambda: store._database.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(StorageError):
        await store.save(stored(0, size=100_000))
    assert (await store.find("r0", "a")).status == "queued"
