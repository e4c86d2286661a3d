from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import pickle
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from helpers.engine_fakes import ByteDecoder
from helpers.scripted_core import ScriptedCore
from helpers.tokenized import tokenized

from sglang_jax import errors
from sglang_jax.engine import core_link
from sglang_jax.engine.cumulative import CumulativeOutputs
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.output import PIECE_LOGPROBS, Completion, RequestOutputs, request_error
from sglang_jax.engine.packed_logprobs import token_logprob
from sglang_jax.engine.types import FinishKind, FinishReason, GenerateInput, GenerateOutput, OutputDelta
from sglang_jax.errors import RequestError
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.messages import (
    DraftCounts,
    Finished,
    SchedulerStats,
    Started,
    StepOutputs,
    WireError,
    WireLogprob,
)


def completion(stop: tuple[str, ...] = ()) -> Completion:
    outputs = RequestOutputs(tokenized(GenerateInput(prompt=[1, 2, 3], stream=True)))
    text = OutputText(ByteDecoder(), stop, frozenset({0}))
    return Completion(outputs, index=0, prompt_tokens=3, text=text)


def logprob(token_id: int) -> WireLogprob:
    return WireLogprob(token_id, -float(token_id), [], [])


def test_tokens_sampled_after_a_stop_string_are_dropped() -> None:
    """A step may publish the tokens of two."""
    each = completion(stop=("b",))
    for token_id in (97, 98, 99):
        each.add_logprob(logprob(token_id))
    assert [each.push(97), each.push(98)] == [False, True]
    delta = each.take()
    assert (delta.text, delta.token_ids, delta.completion_tokens) == ("a", [97, 98], 2)
    assert [entry.token_id for entry in delta.logprobs] == [97, 98]
    assert each.delivered


async def test_a_late_reader_of_a_stream_gets_it_in_pieces() -> None:
    """Regression: thousands of tokens with twenty alternatives each, at once, blocked the event loop for a quarter of a
    second."""
    request = GenerateInput(prompt=[1, 2, 3], stream=True, return_logprob=True, top_logprobs_num=20)
    outputs = RequestOutputs(tokenized(request))
    one = Completion(outputs, index=0, prompt_tokens=3, text=OutputText(ByteDecoder(), (), frozenset({0})))
    outputs.completions = [one]
    tokens = [97 + number % 26 for number in range(1000)]
    for token_id in tokens:
        one.add_logprob(WireLogprob(token_id, -1.0, [token_id] * 20, [-1.0] * 20))
        one.push(token_id)
    assert one.unread_bytes > 1000 * 20 * 12
    one.end(Finished(1, "length", None, 1000, b"", 0))
    deltas: list[OutputDelta] = []
    turns = 0
    while ready := await outputs.take():
        deltas += ready
        asyncio.get_running_loop().call_soon(lambda: None)
        turns += 1
    assert max(21 * len(delta.token_ids) for delta in deltas) <= PIECE_LOGPROBS
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == tokens
    assert "".join(delta.text for delta in deltas) == bytes(tokens).decode()
    assert [delta.completion_tokens for delta in deltas] == list(np.cumsum([len(delta.token_ids) for delta in deltas]))
    assert [delta.finish is not None for delta in deltas] == [False] * (turns - 1) + [True]
    assert one.unread_bytes == 0


async def test_other_tasks_run_between_pieces() -> None:
    request = GenerateInput(prompt=[1], stream=True, return_logprob=True)
    outputs = RequestOutputs(tokenized(request))
    one = Completion(outputs, index=0, prompt_tokens=1, text=OutputText(ByteDecoder(), (), frozenset({0})))
    outputs.completions = [one]
    for _ in range(3 * PIECE_LOGPROBS):
        one.add_logprob(logprob(97))
        one.push(97)
    seen: list[str] = []

    async def read() -> None:
        for _ in range(3):
            await outputs.take()
            seen.append("piece")

    async def other() -> None:
        for _ in range(2):
            seen.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(read(), other())
    assert seen == ["piece", "other", "piece", "other", "piece"]


async def test_unread_streams_have_a_total_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream with the most unread output is ended; the others continue. Requests that do not stream are not
    counted."""
    monkeypatch.setattr(core_link, "UNREAD_SECONDS", 0.0)
    core = ScriptedCore()
    client = core.client(max_unread_bytes=100_000)
    sampling = SamplingParams(max_new_tokens=4000)
    names = ("unread", "little", "whole")
    streams = [
        client.generate(GenerateInput(prompt=[1], sampling=sampling, stream=name != "whole", request_id=name))
        for name in names
    ]
    first = [asyncio.create_task(anext(stream)) for stream in streams[:2]]
    whole = asyncio.create_task(anext(streams[2]))
    while len(core.new) < 3:
        await asyncio.sleep(0.001)
    unread, little, not_streamed = (message.id for message in core.new)

    def step(counts: dict[int, int]) -> None:
        ids = [wire_id for wire_id, count in counts.items() for _ in range(count)]
        tokens = np.full(len(ids), 97, np.int32)
        core.deliver(StepOutputs(ids=np.array(ids, np.int64).tobytes(), tokens=tokens.tobytes()))

    step({unread: 1, little: 1})
    assert [(await task).token_ids for task in first] == [[97], [97]]
    for _ in range(12):
        step({unread: 100, little: 10})
    assert core.aborted == [unread]
    with pytest.raises(errors.UnreadError, match=r"of this stream are unread.*the limit for all is 100000"):
        await anext(streams[0])
    assert (await anext(streams[1])).token_ids == [97] * 120
    core.deliver(
        StepOutputs(
            ids=b"",
            tokens=b"",
            finished=[Finished(not_streamed, "length", None, 3000, np.full(3000, 97, np.int32).tobytes(), 0)],
        )
    )
    assert len((await whole).token_ids) == 3000
    for stream in streams:
        await stream.aclose()
    await client.close()


async def test_an_output_has_the_version_of_the_weights_that_ended_it() -> None:
    """A snapshot of the core names the version of all outputs after it. What had ended before keeps its own."""
    core = ScriptedCore()
    client = core.client()
    sampling = SamplingParams(max_new_tokens=9, stop=("c",))
    readers = [
        asyncio.create_task(anext(client.generate(GenerateInput(prompt=[1], sampling=sampling, stream=stream))))
        for stream in (True, False, False)
    ]
    while len(core.new) < 3:
        await asyncio.sleep(0)

    def step(number: int, text: bytes) -> None:
        ids, tokens = np.full(len(text), core.new[number].id, np.int64), np.array([*text], np.int32)
        core.deliver(StepOutputs(ids=ids.tobytes(), tokens=tokens.tobytes()))

    core.deliver(SchedulerStats(weight_version="v1"))
    step(0, b"ab")
    step(1, b"abc")
    assert (await readers[0]).weight_version == "v1"
    core.deliver(SchedulerStats(weight_version="v2"))
    step(2, b"abc")
    assert [(await reader).weight_version for reader in readers[1:]] == ["v1", "v2"]
    await client.close()


@pytest.mark.parametrize("drafting", [True, False])
async def test_an_output_ended_by_a_stop_string_has_its_draft_counts(drafting: bool) -> None:
    """The core's final message, which usually carries them, is missing here."""
    core = ScriptedCore()
    client = core.client()
    sampling = SamplingParams(max_new_tokens=9, stop=("d",))
    reader = asyncio.create_task(anext(client.generate(GenerateInput(prompt=[1], sampling=sampling))))
    while not core.new:
        await asyncio.sleep(0)
    number = core.new[0].id
    for text, drafts in (("ab", [(3, 1)]), ("c", []), ("def", [(5, 4)])):
        core.deliver(
            StepOutputs(
                ids=np.array([number] * len(text), "<i8").tobytes(),
                tokens=np.array(list(text.encode()), "<i4").tobytes(),
                started=[Started(number, 0, drafting=drafting)] if text == "ab" else [],
                drafts=np.array([(number, *one) for one in drafts if drafting], "<i8").tobytes(),
            )
        )
    output = await reader
    assert output.text == "abc"
    assert output.drafts == (DraftCounts(2, 8, 5) if drafting else None)
    assert core.stopped == [number]


@pytest.mark.parametrize("kind", ["abort", "length"])
async def test_the_core_decides_how_an_aborted_output_with_a_stop_string_ended(kind: str) -> None:
    """The core decides whether a turn of a session counts, and may have ended it before the abort arrived."""
    core = ScriptedCore()
    client = core.client()
    sampling = SamplingParams(max_new_tokens=3, stop=("b",))
    request = GenerateInput(prompt=[1], sampling=sampling, stream=True, request_id="x", return_logprob=True)
    deltas: list[OutputDelta] = []

    async def read() -> None:
        deltas.extend([delta async for delta in client.generate(request)])

    reader = asyncio.create_task(read())
    while not core.new:
        await asyncio.sleep(0)
    client.abort("x")
    [number] = core.aborted
    tokens = np.array([97, 98, 99], "<i4").tobytes()
    entries = [(number, logprob(token)) for token in (97, 98, 99)]
    core.deliver(StepOutputs(ids=np.array([number] * 3, "<i8").tobytes(), tokens=tokens, logprobs=entries))
    for _ in range(5):
        await asyncio.sleep(0)
    assert core.stopped == [number]
    assert not any(delta.finish for delta in deltas)
    core.deliver(StepOutputs(ids=b"", tokens=b"", finished=[Finished(number, kind, None, 3, b"", 0)]))
    await reader
    assert "".join(delta.text for delta in deltas) == "a"
    assert [token for delta in deltas for token in delta.token_ids] == [97, 98]
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == [97, 98]
    finish = deltas[-1].finish
    assert finish is not None
    assert finish.kind is (FinishKind.ABORT if kind == "abort" else FinishKind.STOP)
    await client.close()


def test_no_logprob_is_lost_or_repeated_when_some_were_read_before() -> None:
    each = completion(stop=("c",))
    each.add_logprob(logprob(97))
    each.push(97)
    assert [entry.token_id for entry in each.take().logprobs] == [97]
    for token_id in (98, 99, 100):
        each.add_logprob(logprob(token_id))
    assert [each.push(98), each.push(99)] == [False, True]
    assert [entry.token_id for entry in each.take().logprobs] == [98, 99]


def test_deltas_hold_everything_once() -> None:
    each = completion()
    each.add_prompt_logprobs([logprob(1)])
    each.push(97)
    first = each.take()
    assert not each.has_news
    each.push(98)
    assert each.has_news
    second = each.take()
    assert (first.text, first.token_ids, first.completion_tokens) == ("a", [97], 1)
    assert (second.text, second.token_ids, second.completion_tokens) == ("b", [98], 2)
    assert [len(delta.prompt_logprobs or []) for delta in (first, second)] == [1, 0]


def test_tokens_that_were_read_are_forgotten() -> None:
    each = completion(stop=("never",))
    tracemalloc.start()
    sizes = []
    for _ in range(2):
        for _ in range(2000):
            each.add_logprob(logprob(97))
            each.push(97)
            each.take()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 2000  # a byte for each token would be too much


def test_unread_logprobs_are_stored_compactly_and_completely() -> None:
    """A client may leave thousands of tokens unread, with twenty alternatives each."""
    each = completion()
    alternatives = [(-number / 7 - 0.1, 1000 + number) for number in range(20)]
    tracemalloc.start()
    for position in range(2000):
        ids, logprobs = [token for _, token in alternatives], [value for value, _ in alternatives]
        each.add_logprob(WireLogprob(position % 128, -0.3, ids, logprobs))
        each.push(97)
    waiting, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert waiting / 2000 < 700
    taken = each.take().logprobs
    assert len(taken) == 2000
    assert taken[7] == token_logprob(WireLogprob(7, -0.3, ids, logprobs))
    assert all(one.top == tuple(alternatives) for one in taken)


@pytest.mark.parametrize("of", ["prompt", "output"])
def test_logprobs_of_a_complete_answer_are_stored_compactly_until_they_are_read(of: str) -> None:
    """An answer for many prompts holds those of all until the last has ended: as tuples each took 2.4 kB."""
    ids, logprobs = list(range(1000, 1020)), [-number / 7 - 0.1 for number in range(20)]
    wire = [WireLogprob(position % 128, -0.3, ids, logprobs) for position in range(2000)]
    tracemalloc.start()
    prompt = np.zeros(2000, np.int32)
    outputs = RequestOutputs(
        tokenized(GenerateInput(prompt=prompt, return_logprob=True, logprob_start_len=0, top_logprobs_num=20))
    )
    each = Completion(outputs, index=0, prompt_tokens=2000, text=OutputText(ByteDecoder(), (), frozenset({0})))
    outputs.completions = (each,)
    if of == "prompt":
        each.add_prompt_logprobs(wire)
    for entry in wire if of == "output" else ():
        each.add_logprob(entry)
        each.push(97)
    each.end_with(FinishReason(FinishKind.LENGTH))
    delta = each.take()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / 2000 < 700
    found = delta.prompt_logprobs if of == "prompt" else delta.logprobs
    assert found is not None
    assert found == list(found) == [token_logprob(entry) for entry in wire]
    assert (found[-1], found[3:5]) == (token_logprob(wire[-1]), list(map(token_logprob, wire[3:5])))
    assert found != list(found)[1:]


def test_outputs_built_earlier_do_not_change() -> None:
    each, outputs = completion(), CumulativeOutputs("r", first_index=5)
    each.push(97)
    first = outputs.add(each.take())
    each.push(98)
    second = outputs.add(each.take())
    assert (first.request_id, first.index, first.text, first.output_ids) == ("r", 5, "a", [97])
    assert (second.text, second.delta_text, second.output_ids, second.delta_ids) == ("ab", "b", [97, 98], [98])


def test_the_final_output_has_the_times_of_the_first_and_last_token() -> None:
    """From the core, or from the client where a stop string ends the output and the core sends nothing more."""
    stopped, before = completion(stop=("b",)), time.monotonic()
    stopped.push(97)
    assert stopped.take().sampled is None
    stopped.push(98)
    first, last = stopped.take().sampled or (0.0, 0.0)
    assert before <= first <= last <= time.monotonic()
    ended = completion()
    ended.queue_seconds = 0.25
    ended.push(97)
    assert (ended.take().queue_seconds, ended.take().queue_seconds) == (0.25, None)
    ended.end(Finished(1, "length", None, 1, b"", 0, sampled=(1.5, 2.5)))
    assert ended.take().sampled == (1.5, 2.5)


def grown(tokens: int = 6) -> tuple[CumulativeOutputs, list[GenerateOutput]]:
    """Outputs of a stream, one token each, of which none was read."""
    each, outputs = completion(), CumulativeOutputs("r")
    found = []
    for token in range(tokens):
        each.add_logprob(logprob(97 + token))
        each.push(97 + token)
        found.append(outputs.add(each.take()))
    return outputs, found


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1), (2, 5, 0, 4, 1, 3)], ids=["first", "last", "mixed"])
def test_each_output_of_a_stream_keeps_its_own_part_until_it_is_read(order: Sequence[int]) -> None:
    outputs, found = grown()
    for place in order:
        output, count = found[place], place + 1
        assert output.text == "abcdef"[:count]
        assert output.output_ids == list(range(97, 97 + count))
        assert [entry.token_id for entry in output.logprobs] == output.output_ids
    assert outputs.add(OutputDelta(**DELTA)).text == "abcdefx"


def test_changes_of_an_outputs_lists_do_not_affect_others() -> None:
    _, found = grown()
    found[2].output_ids.append(1)
    found[2].logprobs.clear()
    assert found[2].output_ids == [97, 98, 99, 1]
    assert found[2].logprobs == []
    assert found[3].output_ids == [97, 98, 99, 100]
    assert len(found[3].logprobs) == 4


def test_an_unread_output_is_not_built() -> None:
    """Regression: each token copied all tokens so far: 45 us each at 32k tokens of output."""
    outputs, _ = grown(1)
    tracemalloc.start()
    kept = [outputs.add(OutputDelta(**DELTA)) for _ in range(2000)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / len(kept) < 500  # copies of all tokens so far would be 8 kB of ids on average
    assert len(kept[-1].output_ids) == 2001


DELTA: dict[str, Any] = {
    "index": 0,
    "text": "x",
    "token_ids": [120],
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "cached_tokens": 0,
}


@pytest.mark.parametrize(
    "copied",
    [
        dataclasses.replace,
        copy.copy,
        copy.deepcopy,
        lambda output: pickle.loads(pickle.dumps(output)),
        lambda output: GenerateOutput(
            **{**dataclasses.asdict(output), "logprobs": output.logprobs, "delta_logprobs": []}
        ),
    ],
    ids=["replace", "copy", "deepcopy", "pickle", "asdict"],
)
def test_an_output_of_a_stream_is_a_dataclass_like_any_other(
    copied: Callable[[GenerateOutput], GenerateOutput],
) -> None:
    outputs, found = grown()
    other = copied(found[2])
    outputs.add(OutputDelta(**DELTA))
    assert (other.text, other.output_ids, len(other.logprobs)) == ("abc", [97, 98, 99], 3)
    assert "text='abc'" in repr(found[2])
    assert found[2] == dataclasses.replace(found[2])
    assert found[2] != found[3]
    with pytest.raises(AttributeError, match="'GenerateOutput' object has no attribute 'outputs_ids'"):
        found[2].outputs_ids  # type: ignore[attr-defined]  # noqa: B018


def test_outputs_may_be_read_in_one_thread_while_another_adds_tokens() -> None:
    outputs, found = grown(1)
    wrong: list[int] = []

    def read() -> None:
        while len(found) < 20_000:
            output = found[-1]
            if not len(output.text) == len(output.output_ids) == len(output.logprobs) == output.completion_tokens:
                wrong.append(output.completion_tokens)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    entry = token_logprob(logprob(120))
    for number in range(2, 20_001):
        delta = {**DELTA, "completion_tokens": number, "logprobs": [entry]}
        found.append(outputs.add(OutputDelta(**delta)))
    for reader in readers:
        reader.join()
    assert not wrong


def test_a_stop_string_in_held_back_text_wins_over_the_length() -> None:
    each = completion(stop=("\N{REPLACEMENT CHARACTER}",))
    tokens = np.frombuffer("a€".encode()[:2], np.uint8).astype("<i4").tobytes()
    each.end(Finished(1, "length", None, 2, tokens, 0))
    output = each.take()
    assert output.text == "a"
    assert output.finish is not None
    assert output.finish.kind is FinishKind.STOP


@pytest.mark.parametrize(
    "error",
    [
        errors.ParameterError("m", param="p"),
        errors.PromptTooLongError("m", param="prompt"),
        errors.QueueFullError("m"),
        errors.CapacityError("m", code="other"),
        errors.NumericalError("m"),
        RequestError("m"),
    ],
)
def test_errors_of_the_scheduler_keep_their_type_and_message(error: RequestError) -> None:
    got = request_error(WireError(type(error).__name__, error.message, error.param, error.code))
    assert type(got) is type(error)
    assert (got.message, got.param, got.code, got.status) == (error.message, error.param, error.code, error.status)


async def test_an_error_that_ended_a_request_keeps_no_reference_to_its_output() -> None:
    """Its traceback refers to the frame that raised it. Regression: a megabyte of an unread stream stayed until the
    garbage collector ran."""
    gc.disable()
    try:
        outputs = RequestOutputs(tokenized(GenerateInput(prompt=[1, 2, 3], stream=True)))
        outputs.give_up(errors.UnreadError("unread"))
        with suppress(errors.UnreadError):
            await outputs.take()
        outputs.close()
        left = weakref.ref(outputs)
        del outputs
        assert left() is None
    finally:
        gc.enable()


def with_prompt_logprobs(n: int) -> tuple[RequestOutputs, list[Completion]]:
    request = GenerateInput(
        prompt=[1] * 100,
        sampling=SamplingParams(n=n),
        stream=True,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
    )
    outputs = RequestOutputs(tokenized(request))
    each = [
        Completion(outputs, index=index, prompt_tokens=100, text=OutputText(ByteDecoder(), (), frozenset({0})))
        for index in range(n)
    ]
    outputs.completions = each
    each[0].add_prompt_logprobs([WireLogprob(1, -1.0, [1] * 20, [-1.0] * 20)] * 100)
    return outputs, each


async def test_the_logprobs_of_a_prompt_are_kept_until_all_completions_have_started() -> None:
    """Regression: they were not counted as unread, and were kept for as long as the request ran."""
    outputs, each = with_prompt_logprobs(2)
    assert outputs.unread_bytes > 100 * 20 * 12
    for completion in each:
        assert outputs.prompt_logprobs is not None
        completion.push(97)
        [delta] = await outputs.take()
        assert delta.prompt_logprobs is not None
        assert len(delta.prompt_logprobs) == 100
        kept = weakref.ref(delta.prompt_logprobs)
    del delta
    assert outputs.prompt_logprobs is None
    assert kept() is None
    each[0].add_prompt_logprobs([logprob(1)])  # of a prompt that was aborted before its end
    assert outputs.unread_bytes == 0
    each[0].push(98)
    assert [delta.prompt_logprobs for delta in await outputs.take()] == [None]


def test_an_abandoned_stream_keeps_no_logprobs_of_its_prompt() -> None:
    outputs, _ = with_prompt_logprobs(1)
    outputs.give_up(errors.UnreadError("unread"))
    assert outputs.prompt_logprobs is None
    assert outputs.unread_bytes == 0


async def test_the_engine_keeps_no_output_that_a_slow_client_has_already_got() -> None:
    """Regression: its last output was kept until it asked for more: megabytes, with a prompt's logprobs."""
    core = ScriptedCore()
    client = core.client()
    request = GenerateInput(prompt=[1, 2], stream=True, return_logprob=True, logprob_start_len=0)
    stream = client.generate(request)
    first = asyncio.create_task(anext(stream))
    while not core.new:
        await asyncio.sleep(0.001)
    wire_id = core.new[0].id
    ids, tokens = np.array([wire_id], np.int64).tobytes(), np.array([97], np.int32).tobytes()
    prompt = [(wire_id, [logprob(1), logprob(2)])]
    core.deliver(StepOutputs(ids=ids, tokens=tokens, prompt_logprobs=prompt, logprobs=[(wire_id, logprob(97))]))
    kept = weakref.ref((await first).prompt_logprobs or [])
    del first
    await asyncio.sleep(0)  # the task's step ends
    assert kept() is None
    await stream.aclose()
    await client.close()
