"""Output of the core, in any steps and with any reader, equals a naive oracle's answer in every format."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from helpers.engine_fakes import EOS, logprob_entry
from helpers.scripted_core import ScriptedCore
from helpers.whole_outputs import collect
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

import sglang_jax
from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import GenerateInput
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.messages import Finished, NewRequest, Started, StepOutputs
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.context import ServerContext
from sglang_jax.server.streaming import DONE, OPENAI_EVENTS, RESPONSE_SLICE, EventStream

PROMPT = "pq"
TOP = 2
CACHED = 1

texts = st.text('ab€😀"\\\n', max_size=9)
stops = st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3, unique=True)


@dataclass(frozen=True)
class Case:
    """The outputs of n completions, the steps in which they arrive, and the options of the request.

    - `outputs`: token ids; `steps`: how many tokens each step gives to each completion; the rest comes in a last
      step.
    - `pauses`: turns of the event loop that the reader waits after each step.
    """

    outputs: list[list[int]]
    steps: list[list[int]]
    pauses: list[int]
    stop: list[str]
    include_stop: bool
    logprobs: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def output() -> list[int]:
        ids = list(draw(texts).encode())
        return ids[: len(ids) - draw(st.integers(0, 3))] + [EOS] * draw(st.integers(0, 1))

    outputs = [output() or [EOS] for _ in range(draw(st.integers(1, 3)))]
    count = draw(st.integers(0, 12))
    each = st.lists(st.integers(0, 3), min_size=len(outputs), max_size=len(outputs))
    return Case(
        outputs,
        draw(st.lists(each, min_size=count, max_size=count)),
        draw(st.lists(st.integers(0, 8), min_size=count + 1, max_size=count + 1)),
        draw(stops),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@dataclass(frozen=True)
class Expected:
    """The expected completion. `matched`: the stop string or token, None for an output that ran to its length."""

    text: str
    ids: list[int]
    matched: str | int | None


def whole_characters(ids: list[int]) -> str:
    """The text of bytes whose last character may be incomplete."""
    for end in range(len(ids), -1, -1):
        try:
            return bytes(ids[:end]).decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError


def oracle(case: Case, ids: list[int]) -> Expected:
    """Looks for stop strings in the whole text after each token."""
    ended = EOS if ids[-1] == EOS else None
    shown = [token for token in ids if token != EOS]
    for count in range(1, len(shown) + 2):
        at_end = count > len(shown)
        text = bytes(shown).decode(errors="replace") if at_end else whole_characters(shown[:count])
        for end in range(1, len(text) + 1):
            found = [one for one in case.stop if text[:end].endswith(one)]
            if found:
                longest = max(found, key=len)
                kept = text[: end if case.include_stop else end - len(longest)]
                return Expected(kept, ids if at_end else ids[:count], longest)
    return Expected(bytes(shown).decode(errors="replace"), ids, ended)


async def play(core: ScriptedCore, case: Case) -> None:
    """Sends the outputs once all completions have started. A stopped one continues for a step or two, as engines do."""
    while len(core.new) < len(case.outputs):
        await asyncio.sleep(0)
    left = [list(ids) for ids in case.outputs]
    open_ids = dict(enumerate(core.new))
    first = True
    for counts, pause in zip([*case.steps, [99] * len(left)], case.pauses, strict=True):
        core.deliver(_step(case, left, counts, open_ids, first=first))
        first = False
        for _ in range(pause):
            await asyncio.sleep(0)


def _step(
    case: Case, left: list[list[int]], counts: list[int], open_ids: dict[int, NewRequest], *, first: bool
) -> StepOutputs:
    ids: list[int] = []
    tokens: list[int] = []
    step = StepOutputs(ids=b"", tokens=b"", started=[], finished=[], logprobs=[], prompt_logprobs=[])
    for number, message in list(open_ids.items()):
        if first:
            step.started.append(Started(message.id, CACHED))
            if message.logprob_start >= 0:
                prompt = np.frombuffer(message.token_ids, "<i4").tolist()[message.logprob_start :]
                step.prompt_logprobs.append((message.id, [logprob_entry(token, TOP) for token in prompt]))
        given, left[number] = left[number][: counts[number]], left[number][counts[number] :]
        if message.top_logprobs >= 0:
            step.logprobs.extend((message.id, logprob_entry(token, message.top_logprobs)) for token in given)
        if message.stream:
            ids += [message.id] * len(given)
            tokens += given
        if not left[number] and given:
            whole = case.outputs[number]
            ended = EOS if whole[-1] == EOS else None
            rest = b"" if message.stream else np.array(whole, "<i4").tobytes()
            kind = "length" if ended is None else "stop"
            step.finished.append(Finished(message.id, kind, ended, len(whole), rest, CACHED))
            del open_ids[number]
    return StepOutputs(
        ids=np.array(ids, "<i8").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
        started=step.started,
        finished=step.finished,
        logprobs=step.logprobs,
        prompt_logprobs=step.prompt_logprobs,
    )


class Server:
    """The application without a socket; each request has its own core."""

    def __init__(self) -> None:
        self.context: ServerContext | None = None
        self.app: FastAPI | None = None

    async def answer(self, case: Case, path: str, body: dict[str, Any]) -> bytes:
        core = ScriptedCore()
        client = core.client()
        if self.context is None:
            self.context = create_context(client, ServerConfig(model_path="echo"))
            self.app = create_app(self.context)
        self.context.client = client
        assert self.app is not None
        said: list[bytes] = []
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

        async def send(message: Any) -> None:
            said.append(message.get("body", b""))
            await asyncio.sleep(0)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
        }
        async with asyncio.timeout(20):
            await asyncio.gather(self.app(scope, inbox.get, send), play(core, case))
        await client.close()
        assert not self.context.in_flight
        assert not core.aborted
        return b"".join(said)

    def events(self, case: Case, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        said = asyncio.run(self.answer(case, path, {**body, "stream": True})).decode()
        lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


server = Server()


def sampling(case: Case) -> dict[str, Any]:
    return {"n": len(case.outputs), "stop": case.stop, "no_stop_trim": case.include_stop}


def native(case: Case) -> dict[str, Any]:
    body: dict[str, Any] = {"text": PROMPT, "sampling_params": {**sampling(case), "max_new_tokens": 99}}
    if case.logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": 0}
    return body


def entries(ids: list[int]) -> list[Any]:
    return [[-token / 10, token, None] for token in ids]


def tops(ids: list[int]) -> list[Any]:
    return [[[-(token + i) / 10, token + i, None] for i in range(TOP)] for token in ids]


def check_native(case: Case, answer: dict[str, Any], expected: Expected) -> None:
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (expected.text, expected.ids)
    assert (meta["completion_tokens"], meta["cached_tokens"]) == (len(expected.ids), CACHED)
    reason = meta["finish_reason"]
    if expected.matched is None:
        assert reason == {"type": "length", "length": len(expected.ids)}
    else:
        assert reason == {"type": "stop", "matched": expected.matched}
    if case.logprobs:
        assert meta["output_token_logprobs"] == entries(expected.ids)
        assert meta["output_top_logprobs"] == tops(expected.ids)
        assert meta["input_token_logprobs"] == entries(list(PROMPT.encode()))
        assert meta["input_top_logprobs"] == tops(list(PROMPT.encode()))
    else:
        assert "output_token_logprobs" not in meta


def in_one_piece(case: Case) -> None:
    answer = json.loads(asyncio.run(server.answer(case, "/generate", native(case))))
    for one, ids in zip(answer if isinstance(answer, list) else [answer], case.outputs, strict=True):
        check_native(case, one, oracle(case, ids))


def cumulative(case: Case) -> None:
    """Every event repeats all output so far."""
    last: dict[int, dict[str, Any]] = {}
    for event in server.events(case, "/generate", native(case)):
        expected = oracle(case, case.outputs[event.get("index", 0)])
        before = last.get(event.get("index", 0), {"text": "", "output_ids": []})
        assert event["text"].startswith(before["text"])
        assert expected.text.startswith(event["text"])
        assert len(event["output_ids"]) >= len(before["output_ids"])
        assert event["output_ids"] == expected.ids[: len(event["output_ids"])]
        assert event["meta_info"]["completion_tokens"] == len(event["output_ids"])
        if case.logprobs:
            assert event["meta_info"]["output_token_logprobs"] == entries(event["output_ids"])
            assert event["meta_info"]["input_token_logprobs"] == entries(list(PROMPT.encode()))
        last[event.get("index", 0)] = event
    for index, ids in enumerate(case.outputs):
        check_native(case, last[index], oracle(case, ids))


LISTS = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs")


def incremental(case: Case) -> None:
    """Events send everything once."""
    whole: dict[int, dict[str, Any]] = {}
    for event in server.events(case, "/generate", {**native(case), "incremental_output": True}):
        index = event.get("index", 0)
        if index in whole:
            before = whole[index]
            event["text"] = before["text"] + event["text"]
            event["output_ids"] = before["output_ids"] + event["output_ids"]
            for name in LISTS if case.logprobs else ():
                event["meta_info"][name] = before["meta_info"][name] + event["meta_info"][name]
        whole[index] = event
    for index, ids in enumerate(case.outputs):
        check_native(case, whole[index], oracle(case, ids))


def chat(case: Case) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], **sampling(case)}
    if case.logprobs:
        body |= {"logprobs": True, "top_logprobs": TOP}
    check_openai(case, server.events(case, "/v1/chat/completions", body), "content")


def completions(case: Case) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 99, **sampling(case)}
    if case.logprobs:
        body |= {"logprobs": TOP}
    check_openai(case, server.events(case, "/v1/completions", body), "text")


def check_openai(case: Case, events: list[dict[str, Any]], name: str) -> None:
    said: dict[int, str] = dict.fromkeys(range(len(case.outputs)), "")
    logprobs: dict[int, list[float]] = {index: [] for index in said}
    ends: dict[int, Any] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ends
            said[index] += choice.get("delta", choice).get(name, "")
            if (more := choice.get("logprobs")) is not None:
                logprobs[index] += more.get("token_logprobs") or [one["logprob"] for one in more.get("content", ())]
            if choice["finish_reason"] is not None:
                ends[index] = (choice["finish_reason"], choice["matched_stop"])
    for index, ids in enumerate(case.outputs):
        expected = oracle(case, ids)
        assert said[index] == expected.text
        assert ends[index] == ("length" if expected.matched is None else "stop", expected.matched)
        assert logprobs[index] == ([-token / 10 for token in expected.ids] if case.logprobs else [])


def python(case: Case) -> None:
    """The view of Python callers: each output has all so far."""

    async def run() -> None:
        core = ScriptedCore()
        client = core.client()
        params = SamplingParams(n=len(case.outputs), stop=case.stop, include_stop=case.include_stop)
        request = GenerateInput(prompt=PROMPT, sampling=params, stream=True, return_logprob=case.logprobs)
        outputs, _ = await asyncio.gather(collect(client, request), play(core, case))
        await client.close()
        for index, ids in enumerate(case.outputs):
            expected = oracle(case, ids)
            mine = [output for output in outputs if output.index == index]
            assert "".join(output.delta_text for output in mine) == mine[-1].text == expected.text
            assert [token for output in mine for token in output.delta_ids] == mine[-1].output_ids == expected.ids
            assert all(output.output_ids == expected.ids[: output.completion_tokens] for output in mine)
            assert [output.finish is None for output in mine] == [True] * (len(mine) - 1) + [False]
            found = [entry.token_id for entry in mine[-1].logprobs]
            assert found == (expected.ids if case.logprobs else [])

    asyncio.run(run())


FORMATS = [in_one_piece, cumulative, incremental, chat, completions, python]


@pytest.mark.parametrize("check", FORMATS)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_every_format_equals_the_oracle(check: Callable[[Case], None], case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("path", "body", "events"),
    [
        ("/generate", {"text": PROMPT}, "_repeating"),
        ("/generate", {"text": PROMPT, "incremental_output": True}, "_new_only"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "Conversations.events"),
        ("/v1/completions", {"prompt": PROMPT}, "_events"),
    ],
)
def test_a_token_passes_two_generators_from_wire_to_reply(path: str, body: dict[str, Any], events: str) -> None:
    """Each further generator would cost every token a microsecond."""
    case = Case([[97, 98, 99, EOS]], [[1], [1]], [3, 3, 3], [], False, False)
    seen: list[str] = []

    async def run() -> None:
        before = sys.get_asyncgen_hooks()

        def note(generator: AsyncGenerator[Any, Any]) -> None:
            if Path(sglang_jax.__file__).parent in Path(generator.ag_code.co_filename).parents:
                seen.append(generator.__qualname__)
            before.firstiter(generator)

        sys.set_asyncgen_hooks(note, before.finalizer)
        try:
            await server.answer(case, path, {**body, "stream": True})
        finally:
            sys.set_asyncgen_hooks(*before)

    asyncio.run(run())
    assert sorted(seen) == ["AsyncEngineClient.generate", events]


async def test_a_long_event_is_sent_a_slice_at_a_time() -> None:
    """Sent whole, it was copied by the connection and kept there for its client: megabytes in a cumulative stream."""
    long, bodies = b"x" * (3 * RESPONSE_SLICE + 5), list[bytes]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield long
        yield b"y"

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await EventStream(b"first", events(), OPENAI_EVENTS)({"type": "http"}, receive, send)
    assert b"".join(bodies) == b"first" + long + b"y" + DONE
    assert max(map(len, bodies)) == RESPONSE_SLICE
    assert len(bodies) == 7
