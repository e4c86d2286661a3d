"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import GenerateInput, OutputDelta, TextTokenizer, TokenLogprob
from sglang_jax.engine.validation import check_repeated
from sglang_jax.errors import ParameterError
from sglang_jax.sampling import SamplingParams
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ENGINE_NAMES, ServerContext, new_id, prompt_ids
from sglang_jax.server.fields import check_turns, routing_key
from sglang_jax.server.fill_in import FilledPrompt, GapTokens
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import CompletionLogprobs, CompletionLogprobWriter
from sglang_jax.server.openai_schema import COMPLETION_DEFAULT_MAX_TOKENS, CompletionBody
from sglang_jax.server.openai_usage import Usage, usage_of, usage_so_far, weights_metadata
from sglang_jax.server.openapi import answers
from sglang_jax.server.sampling import OPENAI_NAMES, openai_sampling
from sglang_jax.server.streaming import around, event, json_list_response, open_event_stream, until_disconnect
from sglang_jax.server.token_count import TokenCount

FIELD_NAMES = {**ENGINE_NAMES, **OPENAI_NAMES, "top_logprobs_num": "logprobs"}


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or its next part. `matched_stop` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The answer, or one event of its stream. Usage is absent from streams unless the request asks for it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


@dataclass(slots=True)
class CompletionFormat:
    """Writes the outputs of one call, and keeps the logprob writer of each choice."""

    body: CompletionBody
    prompts: Sequence[str | list[int]]
    tokenizer: TextTokenizer
    model_name: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    tokens: TokenCount = field(default_factory=lambda: TokenCount(current_caller()))
    _filled: list[FilledPrompt] | None = None
    _writers: dict[int, CompletionLogprobWriter] = field(default_factory=dict)
    _last_decoded: tuple[int, str] = (-1, "")

    async def inputs(self, context: ServerContext, headers: Headers) -> list[GenerateInput]:
        """Returns the prompts for the engine; with a suffix, as the model's family marks the gap."""
        body = self.body
        limit = COMPLETION_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = openai_sampling(body, limit, context.generation_defaults)
        with_logprobs = body.logprobs is not None
        check_turns([body.session] * len(self.prompts))
        prompts: Sequence[str | Sequence[int]] = self.prompts
        if body.suffix:
            gap = GapTokens.of(self.tokenizer)
            sampling = gap.stopping(sampling, context.client.model_info)
            self._filled = await self._fill(gap, body.suffix, context, sampling)
            prompts = self._filled
        return [
            GenerateInput(
                prompt=prompt,
                sampling=sampling,
                request_id=engine_id,
                stream=bool(body.stream),
                return_logprob=with_logprobs,
                logprob_start_len=0 if with_logprobs and body.echo else -1,
                top_logprobs_num=body.logprobs or 0,
                extra_key=body.cache_namespace,
                priority=body.priority or 0,
                routing_key=routing_key(body.routing_key, headers),
                session=body.session,
            )
            for prompt, engine_id in zip(prompts, prompt_ids(self.request_id, len(prompts)), strict=True)
        ]

    async def _fill(
        self, gap: GapTokens, suffix: str, context: ServerContext, sampling: SamplingParams
    ) -> list[FilledPrompt]:
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        if len(texts) < len(self.prompts):
            raise ParameterError(
                "suffix needs prompts that are texts, got token ids; send texts, or mark the gap in the ids",
                param="suffix",
            )
        if self.body.session is not None:
            raise ParameterError(
                "suffix cannot be used in a session, whose turns continue a text; remove suffix or session_params",
                param="suffix",
            )
        most = context.client.model_info.context_length

        async def encode(text: str, field: str) -> list[int]:
            return await context.encode(text, self.request_id, add_special_tokens=False, max_tokens=most, param=field)

        return await gap.prompts(texts, suffix, encode, most if sampling.max_new_tokens == 0 else most - 1)

    def choice(self, number: int, delta: OutputDelta) -> CompletionChoice | None:
        """Returns the choice for a delta of prompt `number`, the first with an echoed prompt; None if it is empty."""
        index = number * (self.body.n or 1) + delta.index
        text = delta.text
        logprobs = CompletionLogprobs() if self.body.logprobs is not None else None
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = self._writer()
            if self.body.echo:
                echoed = self._prompt_text(number)
                text = echoed + text
                if logprobs is not None:
                    writer.write(self._shown(number, delta.prompt_logprobs or ()), logprobs)
                writer.end_prompt(echoed)
        finish = delta.finish
        if not text and not delta.logprobs and finish is None:
            return None
        if logprobs is not None:
            writer.write(delta.logprobs, logprobs)
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish.kind.value if finish is not None else None,
            matched_stop=finish.matched if finish is not None else None,
        )

    def whole(self, outputs: list[list[OutputDelta]]) -> Response:
        for number, group in enumerate(outputs):
            for output in group:
                self.tokens.add(number, output)
        answer = self.answer([], usage_of(self.tokens))
        answer.metadata = weights_metadata(chain(*outputs))
        head, tail = around(answer, "choices")
        choices = (self.choice(number, output) for number, group in enumerate(outputs) for output in group)
        return json_list_response(head, choices, tail)

    def _shown(self, number: int, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Returns the logprobs of the echoed tokens."""
        return logprobs if self._filled is None else logprobs[self._filled[number].before]

    def _writer(self) -> CompletionLogprobWriter:
        return CompletionLogprobWriter(self.tokenizer, self._skip_special_tokens, from_prompt=bool(self.body.echo))

    @property
    def _skip_special_tokens(self) -> bool:
        return self.body.skip_special_tokens is not False

    def _prompt_text(self, number: int) -> str:
        prompt = self.prompts[number]
        if isinstance(prompt, str):
            return prompt
        if self._last_decoded[0] != number:  # all n completions of a prompt use it, usually one after the other
            text = self.tokenizer.decode(prompt, skip_special_tokens=self._skip_special_tokens)
            self._last_decoded = (number, text)
        return self._last_decoded[1]

    def answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET) -> Completion:
        return Completion(id=self.request_id, created=self.created, model=self.model_name, choices=choices, usage=usage)


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions")
    @answers(Completion, Completion)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Completes one prompt, or a batch of prompts."""
        context.check_model(body.model)
        body.check_best_of()
        request_id = body.rid or new_id("cmpl")
        prompts = body.prompts()
        context.check_size(len(prompts), len(prompts) * (body.n or 1), "prompt")
        if body.echo:
            echoed = [(prompt, body.n or 1) for prompt in prompts]
            await asyncio.to_thread(check_repeated, echoed, context.client.tokenizer, "echo")
        form = CompletionFormat(body, prompts, context.client.tokenizer, context.config.model_name, request_id)
        if body.stream:
            return await open_event_stream(request, _events(context, form, request.headers))
        return await until_disconnect(request.receive, _whole(context, form, request.headers))

    return router


async def _whole(context: ServerContext, form: CompletionFormat, headers: Headers) -> Response:
    inputs = await form.inputs(context, headers)
    return await context.collect(form.request_id, inputs, form.whole, FIELD_NAMES)


async def _events(context: ServerContext, form: CompletionFormat, headers: Headers) -> AsyncGenerator[bytes, None]:
    inputs = await form.inputs(context, headers)
    async with context.generate(form.request_id, inputs, FIELD_NAMES) as deltas:
        async for number, delta in deltas:
            form.tokens.add(number, delta)
            if delta.prompt_logprobs:
                choice = await context.write_answer(partial(form.choice, number, delta), [delta])
            else:
                choice = form.choice(number, delta)
            if choice is not None:
                yield event(form.answer([choice], usage_so_far(form.tokens, form.body)))
    if form.body.include_usage:
        yield event(form.answer([], usage_of(form.tokens)))
