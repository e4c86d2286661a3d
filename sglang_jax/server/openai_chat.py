"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import GenerateInput, OutputDelta, TextTokenizer
from sglang_jax.engine.validation import check_characters
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ENGINE_NAMES, ServerContext, new_id
from sglang_jax.server.fields import routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import ChatLogprobs, chat_logprobs
from sglang_jax.server.openai_schema import ChatBody, chat_text
from sglang_jax.server.openai_usage import Usage, UsageCount
from sglang_jax.server.sampling import OPENAI_NAMES, openai_sampling
from sglang_jax.server.streaming import event, json_response, open_event_stream, until_disconnect, written

FIELD_NAMES = {**ENGINE_NAMES, **OPENAI_NAMES, "prompt": "messages", "top_logprobs_num": "top_logprobs"}


class AnswerMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `matched_stop` is the stop string or token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    matched_stop: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer as a whole."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct, kw_only=True):
    """What is new in an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """What is new in one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. Usage is absent from streams that were not asked for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(slots=True)
class ChatFormat:
    """How one call's outputs are written, and which choices were begun."""

    body: ChatBody
    tokenizer: TextTokenizer
    model_name: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    usage: UsageCount = field(default_factory=lambda: UsageCount(current_caller()))
    _begun: set[int] = field(default_factory=set)

    def input(self, token_ids: list[int], defaults: GenerationDefaults, headers: Headers) -> GenerateInput:
        """What the engine is asked. Raises `ParameterError`."""
        body = self.body
        return GenerateInput(
            prompt=token_ids,
            sampling=openai_sampling(body, body.token_limit(), defaults),
            request_id=self.request_id,
            stream=bool(body.stream),
            return_logprob=bool(body.logprobs),
            top_logprobs_num=body.top_logprobs or 0,
            extra_key=body.cache_namespace,
            priority=body.priority or 0,
            routing_key=routing_key(body.routing_key, headers),
            continues_text=bool(body.continue_final_message),
        )

    def answer(self, outputs: list[OutputDelta]) -> ChatCompletion:
        """The whole answer, of finished outputs."""
        choices = []
        for output in outputs:
            self.usage.add(0, output)
            assert output.finish is not None
            choices.append(
                ChatChoice(
                    index=output.index,
                    message=AnswerMessage(content=output.text),
                    logprobs=chat_logprobs(self.tokenizer, output.logprobs) if self.body.logprobs else None,
                    finish_reason=output.finish.kind.value,
                    matched_stop=output.finish.matched,
                )
            )
        return ChatCompletion(
            id=self.request_id,
            created=self.created,
            model=self.model_name,
            choices=choices,
            usage=self.usage.total(),
        )

    def changes(self, delta: OutputDelta) -> list[ChunkChoice]:
        """What a delta says: the role once, text, and at last why the answer ended."""
        self.usage.add(0, delta)
        changes: list[ChunkChoice] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            changes.append(ChunkChoice(index=delta.index, delta=Delta(role="assistant", content="")))
        logprobs = None
        if self.body.logprobs and delta.logprobs:
            logprobs = chat_logprobs(self.tokenizer, delta.logprobs)
        if delta.text or logprobs is not None:
            changes.append(ChunkChoice(index=delta.index, delta=Delta(content=delta.text), logprobs=logprobs))
        if delta.finish is not None:
            reason, matched = delta.finish.kind.value, delta.finish.matched
            changes.append(ChunkChoice(index=delta.index, delta=Delta(), finish_reason=reason, matched_stop=matched))
        return changes

    def chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self.request_id, created=self.created, model=self.model_name, choices=choices, usage=usage)


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        context.check_model(body.model)
        body.check_logprobs()
        tokenizer = context.client.tokenizer
        token_ids = await _token_ids(context, body)
        form = ChatFormat(body, tokenizer, context.config.model_name, body.rid or new_id("chatcmpl"))
        prompt = form.input(token_ids, context.generation_defaults, request.headers)
        if body.stream:
            return await open_event_stream(request, _events(context, form, prompt))
        [outputs] = await until_disconnect(request.receive, context.collect(form.request_id, [prompt], FIELD_NAMES))
        return await written(lambda: json_response(form.answer(outputs)), outputs)

    return router


async def _token_ids(context: ServerContext, body: ChatBody) -> list[int]:
    """The tokens of a conversation. Others are served meanwhile.

    **Raises:** as `chat_text` does; `PromptTooLongError` for what no context of the model's holds, in the messages or
    once they are rendered.
    """
    tokenizer, most = context.client.tokenizer, context.client.model_info.context_length
    check_characters(body.num_characters(), tokenizer, most, "messages")
    text = await context.render(partial(chat_text, tokenizer, body))
    check_characters(len(text), tokenizer, most, "messages")
    return await context.client.encode(text, add_special_tokens=False, most_tokens=most, param="messages")


async def _events(context: ServerContext, form: ChatFormat, prompt: GenerateInput) -> AsyncGenerator[bytes, None]:
    no_usage = None if form.body.include_usage else UNSET
    async with context.generate(form.request_id, [prompt], FIELD_NAMES) as deltas:
        async for _, delta in deltas:
            changes = form.changes(delta)
            if len(changes) == 1:
                yield event(form.chunk(changes, no_usage))
            elif changes:
                yield b"".join([event(form.chunk([change], no_usage)) for change in changes])
    if form.body.include_usage:
        yield event(form.chunk([], form.usage.total()))
