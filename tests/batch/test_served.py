"""`/v1/batches` with OpenAI's client: the life of a batch, its files, what is refused, owners and their limits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from openai import APIStatusError, OpenAI
from openai.types import Batch

from sglang_jax.batch.served import service
from sglang_jax.batch.served.record import BatchRecord, write_record
from sglang_jax.batch.served.room import CallerRoom
from sglang_jax.server.callers import Caller, TokenBucket
from sglang_jax.server.file_store import LEAST_COUNTED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    folder = tmp_path_factory.mktemp("batches")
    keys = folder / "keys.json"
    entries = {
        "ann": {"key": "ann's"},
        "bob": {"key": "bob's", "max_concurrent": 2, "hide_cached_tokens": True},
        "cyd": {"key": "cyd's", "tokens_per_minute": 60_000},
        "eve": {"key": "eve's", "admin": True},
    }
    keys.write_text(json.dumps({"keys": entries}))
    with serve_echo(api_keys=keys, files_dir=folder / "here", max_batch_lines=300, max_body_bytes=4000) as server:
        yield server


def client(server: EchoServer, key: str = "ann's") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def line(number: int, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"id {number}",
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"prompt": f"prompt {number}", "max_tokens": 20, **body},
    }


def start(api: OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS, **options: Any) -> Batch:
    content = b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(api: OpenAI, batch: Batch) -> Batch:
    found: list[Batch] = []

    def has_ended() -> bool:
        found.append(api.batches.retrieve(batch.id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    wait_for(has_ended)
    return found[-1]


def lines_of(api: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(one) for one in api.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"model": "default", "max_tokens": 90, "messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_conversations_of_other_apis(keyed: EchoServer, endpoint: str, body: dict[str, Any]) -> None:
    api = client(keyed)
    request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    refused = ended(api, start(api, [{**request, "body": {**body, "background": True}}], endpoint)).errors
    assert refused is not None
    assert "background must not be true" in str((refused.data or [])[0].message)
    batch = ended(api, start(api, [request], endpoint))
    (answer,) = lines_of(api, batch.output_file_id)
    found = answer["response"]["body"]
    assert found["usage"]["output_tokens"] == len("user: Hello\n") + 1  # and the end
    assert batch.usage is not None
    assert batch.usage.input_tokens == len("user: Hello\n")
    if endpoint == "/v1/responses":  # the output file has it
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(found["id"])


def test_a_batch_that_has_ended_frees_its_input(
    keyed: EchoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients see the end once it is on disk, here a slow one, and may delete the input at once."""

    def write_slowly(record: BatchRecord, folder: Path) -> None:
        if record.status.ended:
            time.sleep(0.3)
        write_record(record, folder)

    monkeypatch.setattr(service, "write_record", write_slowly)
    api = client(keyed)
    batch = ended(api, start(api, [line(1)]))
    assert api.files.delete(batch.input_file_id).deleted


def test_the_example_of_openai(keyed: EchoServer, tmp_path: Path) -> None:
    api = client(keyed)
    message = {"role": "user", "content": "Hello"}
    requests = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "default", "messages": [message], "max_tokens": 9},
        }
        for number in range(3)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    file = api.files.create(file=(tmp_path / "in.jsonl").open("rb"), purpose="batch")
    created = api.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        metadata={"description": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert created.status == "validating"
    assert created.metadata == {"description": "nightly"}
    batch = ended(api, created)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    counts, usage = batch.request_counts, batch.usage
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 3, 0)
    answers = {one["custom_id"]: one for one in lines_of(api, batch.output_file_id)}
    assert answers.keys() == {f"request-{number}" for number in range(3)}
    for answer in answers.values():
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["message"]["content"]
    assert usage is not None
    assert usage.output_tokens == sum(one["response"]["body"]["usage"]["completion_tokens"] for one in answers.values())
    times = [created.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=lambda one: one or 0)
    output = api.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 3600
    assert next(one.id for one in api.batches.list(limit=1)) == batch.id
    api.files.delete(file.id)
    api.files.delete(output.id)
    with pytest.raises(APIStatusError, match="404"):
        api.files.content(output.id)


def test_refused_lines_are_in_the_error_file(keyed: EchoServer) -> None:
    api = client(keyed)
    batch = ended(api, start(api, [line(0), line(1, temperature=-1), line(2, model="other"), b"", line(3)]))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 2, "failed": 2, "total": 4}
    assert sorted(one["custom_id"] for one in lines_of(api, batch.output_file_id)) == ["id 0", "id 3"]
    errors = {one["custom_id"]: one for one in lines_of(api, batch.error_file_id)}
    assert {name: one["response"]["status_code"] for name, one in errors.items()} == {"id 1": 400, "id 2": 404}
    assert errors["id 1"]["error"]["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ([], [("empty_file", None)]),
        ([b"", b" "], [("empty_file", None)]),
        ([line(0), b"{nonsense"], [("malformed_json", 2)]),
        (
            [line(0), b"", {**line(1), "url": CHAT}, {**line(2), "url": "/v1/moderations"}],
            [("mismatched_url", 3), ("invalid_value", 4)],
        ),
        ([line(0), line(1), line(0)], [("duplicate_custom_id", 3)]),
        ([{"body": {}, "url": COMPLETIONS}], [("missing_field", 1)]),
        ([line(0, stream=True)], [("unsupported_parameter", 1)]),
        ([line(0), line(1, prompt="x" * 5000)], [("line_too_long", 2)]),
        ([line(number) for number in range(301)], [("too_many_lines", 301)]),
        ([b"[]"] * 150, [("malformed_request", number) for number in range(1, 101)]),
    ],
)
def test_bad_inputs_fail_before_any_line_runs(keyed: EchoServer, lines: list[Any], faults: list[Any]) -> None:
    api = client(keyed)
    seen = len(keyed.seen())
    batch = ended(api, start(api, lines))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [(one.code, one.line) for one in batch.errors.data or ()] == faults
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert len(keyed.seen()) == seen


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "721h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"key": "v" * 513}}, "metadata.key"),
        ({"metadata": {"key": 1}}, "metadata.key"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"color": "red"}, "color"),
        ({"input_file_id": "file-unknown"}, "file_id"),
    ],
)
def test_bad_bodies(keyed: EchoServer, fields: dict[str, Any], param: str) -> None:
    file = client(keyed).files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    answer = keyed.http.post("/v1/batches", json=body, headers={"Authorization": "Bearer ann's"})
    assert answer.status_code == (404 if param == "file_id" else 400)
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_file_of_another_purpose_is_refused(keyed: EchoServer) -> None:
    api = client(keyed)
    file = api.files.create(file=b"{}", purpose="user_data")
    with pytest.raises(APIStatusError, match="must have the purpose batch"):
        api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


def test_a_key_sees_only_its_own_batches(keyed: EchoServer) -> None:
    ann, bob = client(keyed), client(keyed, "bob's")
    batch = ended(ann, start(ann, [line(0)]))
    assert batch.id not in [one.id for one in bob.batches.list()]
    for refused in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(APIStatusError, match="there is no batch"):
            refused(batch.id)
    with pytest.raises(APIStatusError, match="there is no file"):
        bob.files.content(batch.output_file_id or "")
    with pytest.raises(APIStatusError, match="there is no file"):
        bob.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert client(keyed, "eve's").batches.retrieve(batch.id).status == "completed"


def test_lines_are_those_of_their_key(keyed: EchoServer) -> None:
    """The tenant, the part of the cache and what answers hide are as for its other requests."""
    bob = client(keyed, "bob's")
    batch = ended(bob, start(bob, [line(number) for number in range(5)]))
    bob.completions.create(model="default", prompt="prompt 0", max_tokens=1)
    lines = [one for one in keyed.seen() if one["tenant"] == "bob"]
    assert len(lines) == 6
    assert [one["background"] for one in lines] == [True] * 5 + [False]
    assert len({one["extra_key"] for one in lines}) == 1
    assert lines[0]["extra_key"]
    usage = lines_of(bob, batch.output_file_id)[0]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"] is None or usage["prompt_tokens_details"]["cached_tokens"] is None


def test_lines_are_charged_to_their_key(keyed: EchoServer) -> None:
    api = client(keyed, "cyd's")
    cyd = keyed.context.callers.named("cyd")
    assert cyd is not None
    assert cyd.tokens is not None
    assert cyd.tokens.seconds_to_wait(60_000) == 0
    batch = ended(api, start(api, [line(number, prompt="a" * 900, max_tokens=900) for number in range(10)]))
    assert batch.usage is not None
    assert batch.usage.total_tokens == 10 * 1800
    used = 1000 * cyd.tokens.seconds_to_wait(60_000)
    assert 0 < used <= batch.usage.total_tokens  # some are back already
    assert cyd.tokens.seconds_to_wait(30_000) == 0, "half is left to the key's other requests"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EchoServer]:
    """Echoes a token every 20 ms."""
    folder = tmp_path_factory.mktemp("slow")
    keys = folder / "keys.json"
    entries = {"ann": {"key": "ann's"}, "bob": {"key": "bob's", "max_concurrent": 2}}
    keys.write_text(json.dumps({"keys": entries}))
    with serve_echo(model_path="echo:0.02", api_keys=keys, files_dir=folder / "here") as server:
        yield server


def test_cancelled_lines_are_in_the_error_file_and_end_in_the_engine(slow: EchoServer) -> None:
    api = client(slow)
    batch = start(
        api, [line(0, prompt="a", max_tokens=1), *(line(n, prompt="b" * 900, max_tokens=900) for n in range(1, 40))]
    )
    wait_for(lambda: (api.batches.retrieve(batch.id).request_counts or pytest.fail("no counts")).completed == 1)
    with pytest.raises(APIStatusError, match=r"is the input of a batch"):
        api.files.delete(batch.input_file_id)
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = ended(api, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": 1, "failed": 39, "total": 40}
    assert [one["custom_id"] for one in lines_of(api, batch.output_file_id)] == ["id 0"]
    errors = lines_of(api, batch.error_file_id)
    assert sorted(int(one["custom_id"].split()[1]) for one in errors) == list(range(1, 40))
    assert {(one["error"]["code"], one["response"]) for one in errors} == {("batch_cancelled", None)}
    wait_for(lambda: slow.running() == 0)
    with pytest.raises(APIStatusError, match="cancelled; only"):
        api.batches.cancel(batch.id)
    api.files.delete(batch.input_file_id)


def test_a_keys_lines_leave_its_other_requests_their_places(slow: EchoServer) -> None:
    bob = client(slow, "bob's")
    batch = start(bob, [line(n, prompt="b" * 900, max_tokens=900) for n in range(1, 9)])
    wait_for(lambda: slow.running() == 2)
    assert bob.completions.create(model="default", prompt="ab", max_tokens=2, n=2).choices[1].text
    bob.batches.cancel(batch.id)
    assert ended(bob, batch).status == "cancelled"


def test_a_restart_resumes_and_an_expired_batch_ends(tmp_path: Path) -> None:
    """Finished lines are kept and do not run again. What had no time left is in the error file."""
    folder = tmp_path / "here"
    lines = [line(number, prompt=f"{number:03d} and more", max_tokens=3) for number in range(60)]
    with serve_echo(model_path="echo:0.02", files_dir=folder) as server:
        api = client(server)
        going, late = start(api, lines), start(api, lines)
        wait_for(lambda: all((api.batches.retrieve(one.id).request_counts or 0).completed > 4 for one in (going, late)))
    finished = {
        one.id: {json.loads(text)["custom_id"] for text in (folder / "batches" / one.id / "output.jsonl").open()}
        for one in (going, late)
    }
    record = folder / "batches" / late.id / "batch.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"expires_at": int(time.time()) - 1}))
    with serve_echo(files_dir=folder) as server:
        api = client(server)
        going, late = ended(api, going), ended(api, late)
        assert (going.status, late.status) == ("completed", "expired")
        assert late.expired_at is not None
        answered = [one["custom_id"] for one in lines_of(api, going.output_file_id)]
        assert sorted(answered) == sorted(one["custom_id"] for one in lines)
        assert len(server.seen()) == 60 - len(finished[going.id])
        outputs, errors = lines_of(api, late.output_file_id), lines_of(api, late.error_file_id)
        assert {one["custom_id"] for one in outputs} == finished[late.id]
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert sorted(one["custom_id"] for one in (*outputs, *errors)) == sorted(answered)
        assert late.request_counts is not None
        assert late.request_counts.completed == len(outputs) < 60
        for one in (going, late):
            api.files.delete(one.input_file_id)
            api.files.delete(one.output_file_id or "")
        api.files.delete(late.error_file_id or "")
        assert server.context.files is not None
        assert server.context.files.space.used == 0


def test_a_full_disk_fails_the_batch_and_keeps_what_is_answered(tmp_path: Path) -> None:
    with serve_echo(files_dir=tmp_path / "here", max_files_bytes=LEAST_COUNTED + 3000) as server:
        api = client(server)
        batch = ended(api, start(api, [line(number) for number in range(100)]))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [one.code for one in batch.errors.data or ()] == ["storage_full"]
        assert batch.request_counts is not None
        assert len(lines_of(api, batch.output_file_id)) == batch.request_counts.completed > 0


async def test_lines_leave_half_of_the_tokens_to_other_requests() -> None:
    tokens = TokenBucket(60_000)
    room = CallerRoom(Caller("cyd", tokens=tokens).in_background())
    left: list[float] = []

    async def one_line() -> None:
        async with room.line():
            await asyncio.sleep(0.001)
            tokens.take(5000)
            left.append(60_000 - 1000 * tokens.seconds_to_wait(60_000))
        room.learn(5000)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(one_line() for _ in range(20))), 0.5)
    assert 4 <= len(left) < 10
    assert min(left) >= 30_000 - 100
