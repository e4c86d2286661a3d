"""`POST /generate`: SGLang's native route. Events of a stream repeat all text so far, unless asked for what is new."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from sglang_jax.engine.types import FinishKind, FinishReason, GenerateOutput, TextTokenizer, TokenLogprob
from sglang_jax.server.context import ENGINE_NAMES, ServerContext
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import reported
from sglang_jax.server.native_schema import GenerateBody, NativeRequest, native_request
from sglang_jax.server.streaming import event, json_response, open_event_stream, until_disconnect

Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text or None), as SGLang reports a token."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What is told of a completion: all of it, or what is new."""

    text: str
    output_ids: list[int]
    logprobs: list[TokenLogprob]
    with_prompt: bool = True


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """How one call's outputs are written. `begin` is `time.perf_counter()` of its arrival."""

    request: NativeRequest
    tokenizer: TextTokenizer
    text_in_logprobs: bool
    begin: float

    def answer(self, number: int, output: GenerateOutput) -> dict[str, object]:
        """The whole state of one completion of prompt `number`."""
        return self._write(number, output, _Part(output.text, output.output_ids, output.logprobs))

    def addition(self, number: int, output: GenerateOutput, first: bool) -> dict[str, object]:
        """What is new of a completion since its last output; logprobs of its prompt are new in the first."""
        return self._write(number, output, _Part(output.delta_text, output.delta_ids, output.delta_logprobs, first))

    def _write(self, number: int, output: GenerateOutput, part: _Part) -> dict[str, object]:
        prompt = self.request.prompts[number]
        meta: dict[str, object] = {
            "id": prompt.request_id,
            "finish_reason": finish_object(output.finish, output.completion_tokens),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            "e2e_latency": time.perf_counter() - self.begin,
        }
        if prompt.return_logprob:
            positions = (output.prompt_logprobs or []) if part.with_prompt else []
            meta["input_token_logprobs"] = [self._entry(one) for one in positions]
            meta["output_token_logprobs"] = [self._entry(one) for one in part.logprobs]
            if prompt.top_logprobs_num:
                meta["input_top_logprobs"] = [self._top(one) for one in positions]
                meta["output_top_logprobs"] = [self._top(one) for one in part.logprobs]
        return {"text": part.text, "output_ids": part.output_ids, "meta_info": meta}

    def _entry(self, one: TokenLogprob) -> Entry:
        return (reported(one.logprob), one.token_id, self._text(one.token_id))

    def _top(self, one: TokenLogprob) -> Sequence[Entry] | None:
        if one.logprob is None:
            return None
        return [(reported(logprob), token_id, self._text(token_id)) for logprob, token_id in one.top]

    def _text(self, token_id: int) -> str | None:
        return self.tokenizer.token_text(token_id) if self.text_in_logprobs else None


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

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Completes one prompt, or a batch of prompts."""
        begin = time.perf_counter()
        context.check_model(body.model)
        call = native_request(body, context.generation_defaults, request.headers)
        form = NativeFormat(call, context.client.tokenizer, bool(body.return_text_in_logprobs), begin)
        if body.stream:
            return await open_event_stream(request, _events(context, form, bool(body.incremental_output)))
        names = {**ENGINE_NAMES, "prompt": call.prompt_field}
        work = context.collect(call.request_id, call.prompts, names)
        outputs = await until_disconnect(request.receive, work)
        answers = [form.answer(number, output) for number, group in enumerate(outputs) for output in group]
        return json_response(answers[0] if call.single else answers)

    return router


async def _events(context: ServerContext, form: NativeFormat, incremental: bool) -> AsyncGenerator[bytes, None]:
    call = form.request
    names = {**ENGINE_NAMES, "prompt": call.prompt_field}
    async with aclosing(context.generate(call.request_id, call.prompts, names)) as outputs:
        begun: set[int] = set()
        async for number, output in outputs:
            index = call.first_index[number] + output.index
            answer = form.addition(number, output, index not in begun) if incremental else form.answer(number, output)
            begun.add(index)
            yield event(answer if call.single else {"index": index, **answer})
