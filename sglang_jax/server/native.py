"""`POST /generate`: SGLang's native route. Events of a stream repeat all text so far, unless asked for what is new."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta, TextTokenizer, TokenLogprob
from sglang_jax.engine.validation import check_repeated
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ENGINE_NAMES, ServerContext
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import reported
from sglang_jax.server.native_schema import GenerateBody, NativeRequest, native_request
from sglang_jax.server.remote_format import times_to_tell
from sglang_jax.server.streaming import (
    RESPONSE_SLICE,
    event,
    json_list_response,
    open_event_stream,
    until_disconnect,
    written,
)

REPEATED_BYTES = 32 * 2**20
"""Bytes a second of events that repeat all so far, in all streams together: about a tenth of a core."""

SHORT_EVENT = 16_384
"""Events of so many bytes wait for nothing: some thousand tokens without logprobs."""

_encoder = msgspec.json.Encoder()

GAP = b"\0"
"""A byte that no JSON has."""

_GAP_LIST = msgspec.Raw(b"[%b]" % GAP)

Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text or None), as SGLang reports a token."""


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """How one call's outputs are written.

    - `tell_times`: when the engine took it up and sampled, which tells of others' requests.
    - `begin`: `time.perf_counter()` of its arrival.
    """

    request: NativeRequest
    tokenizer: TextTokenizer
    text_in_logprobs: bool
    hide_cached_tokens: bool
    tell_times: bool
    begin: float

    def answer(self, number: int, delta: OutputDelta) -> dict[str, object]:
        """What a delta of prompt `number` says: all of an output that does not stream."""
        prompt = self.request.prompts[number]
        meta: dict[str, object] = {
            "id": prompt.request_id,
            "finish_reason": finish_object(delta.finish, delta.completion_tokens),
            "prompt_tokens": delta.prompt_tokens,
            "completion_tokens": delta.completion_tokens,
            "cached_tokens": None if self.hide_cached_tokens else delta.cached_tokens,
            "e2e_latency": time.perf_counter() - self.begin,
        }
        if self.tell_times:
            meta |= times_to_tell(delta)
        if delta.drafts is not None:
            meta["spec_verify_ct"] = delta.drafts.steps
            meta["spec_draft_token_num"] = delta.drafts.drafts
            meta["spec_accept_token_num"] = delta.drafts.right
        if prompt.return_logprob:
            positions = delta.prompt_logprobs or []
            meta["input_token_logprobs"] = [self._entry(one) for one in positions]
            meta["output_token_logprobs"] = [self._entry(one) for one in delta.logprobs]
            if prompt.top_logprobs_num:
                meta["input_top_logprobs"] = [self._top(one) for one in positions]
                meta["output_top_logprobs"] = [self._top(one) for one in delta.logprobs]
        return {"text": delta.text, "output_ids": delta.token_ids, "meta_info": meta}

    def whole(self, outputs: list[list[OutputDelta]]) -> Response:
        """The answer that does not stream, of the finished outputs of each prompt."""
        answers = (self.answer(number, output) for number, group in enumerate(outputs) for output in group)
        return json_list_response(b"" if self.request.single else b"[", answers, b"" if self.request.single else b"]")

    def _entry(self, one: TokenLogprob) -> Entry:
        return (reported(one.logprob), one.token_id, self._text(one.token_id))

    def _top(self, one: TokenLogprob) -> Sequence[Entry] | None:
        if one.logprob is None:
            return None
        return [(reported(logprob), token_id, self._text(token_id)) for logprob, token_id in one.top]

    def _text(self, token_id: int) -> str | None:
        return self.tokenizer.token_text(token_id) if self.text_in_logprobs else None


class RepeatedAnswer:
    """The answers of one completion in a stream whose events repeat all that was said before.

    What is repeated is written once, as JSON, and copied from then on: an event costs what copying its bytes does. In
    the answers of `add` a `GAP` stands for each, which `pieces` fills: a client that reads slowly has a long event wait
    for it in no further copy.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._lists: dict[str, bytearray] = {}
        self._in_order: list[bytearray] = []

    def add(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer of the next delta, with all that was said before."""
        self._in_order = [self._text, self._lists.setdefault("output_ids", bytearray())]
        self._text += _encoder.encode(answer["text"])[1:-1]
        meta = {
            name: self._list(name, value) if isinstance(value, list) else value
            for name, value in answer["meta_info"].items()
        }
        self._write("output_ids", answer["output_ids"])
        return {"text": msgspec.Raw(b'"%b"' % GAP), "output_ids": _GAP_LIST, "meta_info": meta}

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """An event that carries the answer, in one piece, or a slice at a time if it is long. Nothing may be added
        before the last is taken."""
        around = data.split(GAP)
        parts = [part for pair in zip_longest(around, self._in_order, fillvalue=b"") for part in pair]
        if sum(map(len, parts)) <= RESPONSE_SLICE:
            yield b"".join(parts)
            return
        for part in parts:
            for start in range(0, len(part), RESPONSE_SLICE):
                yield bytes(part[start : start + RESPONSE_SLICE])

    def _list(self, name: str, items: list[Any]) -> msgspec.Raw:
        self._in_order.append(self._lists.setdefault(name, bytearray()))
        self._write(name, items)
        return _GAP_LIST

    def _write(self, name: str, items: list[Any]) -> None:
        written = self._lists[name]
        if items:
            written += (b"," if written else b"") + _encoder.encode(items)[1:-1]


class RepeatPace:
    """How fast the streams of a server may repeat what they have said, all together.

    An event that repeats is as long as the output so far, so a stream is as long as its square: 600 tokens with 20
    alternatives each made 106 MiB. A stream that waits after a long event finds more tokens in its next one, and
    repeats less often; what it says in the end is the same.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    async def after(self, size: int, *, last: bool) -> None:
        """Waits for as long as an event of `size` bytes has to be waited for; not after the last of an output."""
        if size <= SHORT_EVENT:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / REPEATED_BYTES
        if not last:
            await asyncio.sleep(self._free_at - now)


def finish_object(finish: FinishReason | None, completion_tokens: int) -> dict[str, object] | None:
    """SGLang's `finish_reason`; None while the output grows."""
    if finish is None:
        return None
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": completion_tokens}
    return {"type": finish.kind.value, "message": "the request was aborted"}


def native_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    pace = RepeatPace()

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Completes one prompt, or a batch of prompts."""
        begin = time.perf_counter()
        context.check_model(body.model)
        call = native_request(body, context.generation_defaults, request.headers, context.check_size)
        caller = current_caller()
        if body.return_text_in_logprobs:
            repeated = [(one.prompt, one.sampling.n) for one in call.prompts if one.logprob_start_len >= 0]
            await asyncio.to_thread(check_repeated, repeated, context.client.tokenizer, "return_text_in_logprobs")
        text_in_logprobs = bool(body.return_text_in_logprobs)
        form = NativeFormat(
            call, context.client.tokenizer, text_in_logprobs, caller.hide_cached_tokens, caller.admin, begin
        )
        if body.stream:
            return await open_event_stream(request, _events(context, form, None if body.incremental_output else pace))
        names = {**ENGINE_NAMES, "prompt": call.prompt_field}
        work = context.collect(call.request_id, call.prompts, names)
        outputs = await until_disconnect(request.receive, work)
        return await written(lambda: form.whole(outputs), chain(*outputs))

    return router


async def _events(context: ServerContext, form: NativeFormat, pace: RepeatPace | None) -> AsyncGenerator[bytes, None]:
    """The events of a stream; they repeat all so far if there is a `pace`."""
    call = form.request
    names = {**ENGINE_NAMES, "prompt": call.prompt_field}
    repeated: dict[int, RepeatedAnswer] = {}
    async with context.generate(call.request_id, call.prompts, names) as deltas:
        async for number, delta in deltas:
            index = call.first_index[number] + delta.index
            if delta.prompt_logprobs:
                answer = await written(partial(form.answer, number, delta), [delta])
            else:
                answer = form.answer(number, delta)
            if pace is None:
                yield event(answer if call.single else {"index": index, **answer})
                continue
            so_far = repeated.setdefault(index, RepeatedAnswer())
            answer, size = so_far.add(answer), 0
            for piece in so_far.pieces(event(answer if call.single else {"index": index, **answer})):
                size += len(piece)
                yield piece
            await pace.after(size, last=delta.finish is not None)
