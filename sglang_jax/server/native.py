"""SGLang's native routes. `POST /generate`: by default, each event of a stream repeats all output so far. `POST
/open_session` and `POST /close_session`: conversations whose turns send only new text or tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta, TextTokenizer, TokenLogprob
from sglang_jax.engine.validation import check_repeated, new_session
from sglang_jax.scheduler.commands import CloseSession
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ENGINE_NAMES, ServerContext
from sglang_jax.server.errors import ShuttingDownError
from sglang_jax.server.fields import Body, ShortText, claim_of
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import reported
from sglang_jax.server.native_schema import GenerateBody, NativeRequest, native_request
from sglang_jax.server.openapi import GenerateAnswer, GenerateEvent, answers
from sglang_jax.server.remote_format import elapsed_times
from sglang_jax.server.repeats import HeldRepeats, RepeatPace
from sglang_jax.server.streaming import (
    event,
    json_list,
    json_list_response,
    open_event_stream,
    until_disconnect,
)

END_OF_EVENT = b"\n\n"

Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text or None), as SGLang reports a token."""


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """Writes the outputs of one call. `with_times`: answers contain queue and sampling times, which reveal the load of
    others; `begin`: `time.perf_counter()` of the call's arrival."""

    request: NativeRequest
    tokenizer: TextTokenizer
    text_in_logprobs: bool
    hide_cached_tokens: bool
    with_times: bool
    begin: float

    @property
    def field_names(self) -> dict[str, str]:
        return {**ENGINE_NAMES, "prompt": self.request.prompt_field}

    def answer(self, number: int, delta: OutputDelta) -> dict[str, object]:
        """Returns the answer for a delta of prompt `number`: the whole output if it does not stream."""
        prompt = self.request.prompts[number]
        meta: dict[str, object] = {
            "id": prompt.request_id,
            "finish_reason": finish_object(delta.finish, delta.completion_tokens),
            "prompt_tokens": delta.prompt_tokens,
            "completion_tokens": delta.completion_tokens,
            "cached_tokens": None if self.hide_cached_tokens else delta.cached_tokens,
            "e2e_latency": time.perf_counter() - self.begin,
            "weight_version": delta.weight_version,
        }
        if self.with_times:
            meta |= elapsed_times(delta)
        if delta.drafts is not None:
            meta["spec_verify_ct"] = delta.drafts.steps
            meta["spec_draft_token_num"] = delta.drafts.drafts
            meta["spec_accept_token_num"] = delta.drafts.right
        if delta.pooled is not None:
            meta["pooled"] = delta.pooled.tolist()
        if prompt.return_logprob:
            positions = delta.prompt_logprobs or []
            meta["input_token_logprobs"] = json_list(positions, self._entry)
            meta["output_token_logprobs"] = [self._entry(one) for one in delta.logprobs]
            if prompt.top_logprobs_num:
                meta["input_top_logprobs"] = json_list(positions, self._top)
                meta["output_top_logprobs"] = [self._top(one) for one in delta.logprobs]
        return {"text": delta.text, "output_ids": delta.token_ids, "meta_info": meta}

    def whole(self, outputs: list[list[OutputDelta]]) -> Response:
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


def finish_object(finish: FinishReason | None, completion_tokens: int) -> dict[str, object] | None:
    """Returns SGLang's `finish_reason`; None while the output grows."""
    if finish is None:
        return None
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": completion_tokens}
    return {"type": finish.kind.value, "message": "the request was aborted"}


def native_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    repeats = Repeats(HeldRepeats(), RepeatPace())

    @router.post("/generate")
    @answers(GenerateAnswer | list[GenerateAnswer], GenerateEvent)
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
            events = _new_only(context, form) if body.incremental_output else _repeating(context, form, repeats)
            return await open_event_stream(request, events)
        work = context.collect(call.request_id, call.prompts, form.whole, form.field_names, call.claim)
        return await until_disconnect(request.receive, work)

    return router


async def _answer(context: ServerContext, form: NativeFormat, number: int, delta: OutputDelta) -> dict[str, object]:
    write = partial(form.answer, number, delta)
    return await context.write_answer(write, [delta]) if delta.prompt_logprobs else write()


@dataclass(frozen=True, slots=True)
class Repeats:
    """The limits that streams with repeated output share: memory and bytes per second."""

    held: HeldRepeats
    pace: RepeatPace


async def _new_only(context: ServerContext, form: NativeFormat) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; each has only new output."""
    call = form.request
    async with context.generate(call.request_id, call.prompts, form.field_names, call.claim) as deltas:
        async for number, delta in deltas:
            index = call.first_index[number] + delta.index
            answer = await _answer(context, form, number, delta)
            yield event(answer if call.single else {"index": index, **answer})


async def _repeating(context: ServerContext, form: NativeFormat, repeats: Repeats) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream; each repeats all output so far."""
    call, caller = form.request, current_caller().name
    async with context.generate(call.request_id, call.prompts, form.field_names, call.claim) as deltas:
        with repeats.held.share() as share:
            async for number, delta in deltas:
                index, last, size = call.first_index[number] + delta.index, delta.finish is not None, 0
                answer = await _answer(context, form, number, delta)
                del delta  # frees its memory while a slow client reads
                answer = share.add(index, answer)
                for piece in share.pieces(index, event(answer if call.single else {"index": index, **answer})):
                    size += len(piece)
                    yield piece
                    if share.refusal is not None:
                        yield END_OF_EVENT
                        raise share.refusal
                if last:
                    share.drop(index)
                else:
                    await repeats.pace.after(size, caller)


class OpenSessionBody(Body):
    """`capacity_of_str_len`: ignored, because the context length bounds a session. `timeout`: seconds without a turn
    after which it is closed."""

    capacity_of_str_len: Annotated[int, Field(ge=0)] = 0
    session_id: ShortText | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSessionBody(Body):
    session_id: ShortText


def sessions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/open_session")
    async def open_session(body: OpenSessionBody, request: Request) -> str:
        """Opens a session for this API key; returns its id as a JSON string."""
        if context.draining:
            raise ShuttingDownError("the server is shutting down and opens no new sessions")
        owner = current_caller().tenant(claim_of(request.headers).tenant)
        command = new_session(body.session_id, owner, streaming=bool(body.streaming), timeout=body.timeout)
        return await context.client.call(command)

    @router.post("/close_session")
    async def close_session(body: CloseSessionBody, request: Request) -> dict[str, object]:
        """Closes a session of this API key; a running turn still finishes. Its KV in memory becomes an ordinary cached
        prefix."""
        owner = current_caller().tenant(claim_of(request.headers).tenant)
        await context.client.call(CloseSession(body.session_id, owner))
        return {"success": True}

    return router
