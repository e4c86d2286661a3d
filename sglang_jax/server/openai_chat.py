"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import (
    FinishKind,
    FinishReason,
    GenerateInput,
    OutputDelta,
    SessionTurnInput,
    TextTokenizer,
)
from sglang_jax.engine.validation import check_characters
from sglang_jax.replies.parser import CallArguments, CallBegin, Piece, Reasoning, Text
from sglang_jax.sampling import SamplingParams
from sglang_jax.server.callers import current_caller
from sglang_jax.server.chat_replies import ReplyFormats, ReplyPlan, ReplyReader, with_grammar
from sglang_jax.server.context import ENGINE_NAMES, ServerContext, new_id
from sglang_jax.server.fields import routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import ChatLogprobs, chat_logprobs
from sglang_jax.server.openai_schema import ChatBody, ChatText, chat_text
from sglang_jax.server.openai_tools import ToolRequest
from sglang_jax.server.openai_usage import Usage, UsageCount
from sglang_jax.server.sampling import OPENAI_NAMES, openai_sampling
from sglang_jax.server.shared_beginnings import SharedBeginnings
from sglang_jax.server.streaming import event, json_response, open_event_stream, until_disconnect

FIELD_NAMES = {**ENGINE_NAMES, **OPENAI_NAMES, "prompt": "messages", "top_logprobs_num": "top_logprobs"}


SYSTEM_ROLES = ("system", "developer")

CHARACTERS_PER_MESSAGE = 256
"""Rendering a message takes about as long as this many of its characters."""


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call. `arguments`: the text of a JSON object; in a stream, its next part."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True):
    """The next part of a call: first its function's name, then its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class Call(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: str = "function"
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The model's message. `content` is null if it only called tools."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `matched_stop` is the stop string or token id that ended it."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    matched_stop: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The complete answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct, kw_only=True):
    """The next part of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The next part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. Usage is absent unless the request asks for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


@dataclass(slots=True)
class ChatFormat:
    """Writes the outputs of one request, and keeps the parser of each choice."""

    body: ChatBody
    plan: ReplyPlan
    tokenizer: TextTokenizer
    model_name: str
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))
    usage: UsageCount = field(default_factory=lambda: UsageCount(current_caller()))
    _readers: dict[int, ReplyReader | None] = field(default_factory=dict)

    def input(
        self, token_ids: list[int], sampling: SamplingParams, headers: Headers, bos: int | None, shared_len: int
    ) -> GenerateInput:
        body = self.body
        return GenerateInput(
            prompt=token_ids,
            sampling=with_grammar(sampling, self.plan),
            request_id=self.request_id,
            stream=bool(body.stream),
            return_logprob=bool(body.logprobs),
            top_logprobs_num=body.top_logprobs or 0,
            extra_key=body.cache_namespace,
            priority=body.priority or 0,
            routing_key=routing_key(body.routing_key, headers),
            session=_turn(body.session, token_ids, bos),
            markers=self.plan.markers,
            continues_text=bool(body.continue_final_message),
            shared_len=shared_len,
        )

    def answer(self, outputs: list[OutputDelta]) -> ChatCompletion:
        choices = []
        for output in outputs:
            self.usage.add(0, output)
            assert output.finish is not None
            reader = self.plan.reader()
            choices.append(
                ChatChoice(
                    index=output.index,
                    message=self._message(output, reader),
                    logprobs=chat_logprobs(self.tokenizer, output.logprobs) if self.body.logprobs else None,
                    finish_reason=_reason(output.finish, reader),
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

    def _message(self, output: OutputDelta, reader: ReplyReader | None) -> AnswerMessage:
        if reader is None:
            return AnswerMessage(content=output.text)
        content, reasoning = "", ""
        calls: list[Call] = []
        for piece in reader.read(output.text, finished=True):
            match piece:
                case Text():
                    content += piece.text
                case Reasoning():
                    reasoning += piece.text
                case CallBegin():
                    calls.append(Call(id=self.plan.call_id(), function=CalledFunction(name=piece.name, arguments="")))
                case CallArguments():
                    calls[piece.index].function.arguments += piece.text
        return AnswerMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def changes(self, delta: OutputDelta) -> list[ChunkChoice]:
        """Returns the chunks for a delta: the role, then text, reasoning and calls, and finally the finish reason."""
        self.usage.add(0, delta)
        index, finish = delta.index, delta.finish
        deltas: list[Delta] = []
        if index not in self._readers:
            self._readers[index] = self.plan.reader()
            deltas.append(Delta(role="assistant", content=""))
        first_content = len(deltas)
        reader = self._readers[index]
        if reader is not None:
            deltas += self._pieces(reader.read(delta.text, finished=finish is not None))
        elif delta.text:
            deltas.append(Delta(content=delta.text))
        changes = []
        if self.body.logprobs and delta.logprobs:
            if first_content == len(deltas):
                deltas.append(Delta(content=""))
            logprobs = chat_logprobs(self.tokenizer, delta.logprobs)
            changes = [ChunkChoice(index=index, delta=one) for one in deltas]
            changes[first_content].logprobs = logprobs
        else:
            changes = [ChunkChoice(index=index, delta=one) for one in deltas]
        if finish is not None:
            reason = _reason(finish, reader)
            changes.append(ChunkChoice(index=index, delta=Delta(), finish_reason=reason, matched_stop=finish.matched))
        return changes

    def _pieces(self, pieces: list[Piece]) -> list[Delta]:
        """Returns deltas. A call's name and its first arguments share one."""
        deltas: list[Delta] = []
        call: CallDelta | None = None
        for piece in pieces:
            match piece:
                case Text():
                    deltas.append(Delta(content=piece.text))
                case Reasoning():
                    deltas.append(Delta(reasoning_content=piece.text))
                case CallBegin():
                    function = CalledFunction(name=piece.name, arguments="")
                    call = CallDelta(index=piece.index, id=self.plan.call_id(), type="function", function=function)
                    deltas.append(Delta(tool_calls=[call]))
                case CallArguments():
                    if call is None:  # started in an earlier delta
                        call = CallDelta(index=piece.index, function=CalledFunction(arguments=""))
                        deltas.append(Delta(tool_calls=[call]))
                    call.function.arguments += piece.text
        return deltas

    def chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self.request_id, created=self.created, model=self.model_name, choices=choices, usage=usage)


def _reason(finish: FinishReason, reader: ReplyReader | None) -> str:
    """Returns OpenAI's finish reason, after the reader has read the whole answer."""
    called = reader is not None and reader.called
    return "tool_calls" if called and finish.kind is FinishKind.STOP else finish.kind.value


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    client, config = context.client, context.config
    formats: list[ReplyFormats] = []
    beginnings = SharedBeginnings()

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        context.check_model(body.model)
        body.check_logprobs()
        tokenizer = client.tokenizer
        if not formats:
            formats.append(ReplyFormats(config, tokenizer))
        tools = body.tool_request(config.max_tools_per_request)
        formats[0].check(tools)
        sampling = openai_sampling(body, body.token_limit(), context.generation_defaults)
        request_id = body.rid or new_id("chatcmpl")
        rendering = _render_and_encode(context, body, tools, formats[0], request_id)
        chat, token_ids = await until_disconnect(request.receive, rendering)
        plan = formats[0].plan(
            chat.text,
            sampling,
            tools,
            continued=chat.continued,
            separate=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
            shows_reasoning=body.shows_reasoning,
        )
        form = ChatFormat(body, plan, tokenizer, config.model_name, request_id)
        shared_len = 0
        if client.model_info.keeps_states and body.session is None:
            shared_len = await _shared_len(context, body, chat, token_ids, request_id, beginnings)
        prompt = form.input(token_ids, sampling, request.headers, client.model_info.bos_token_id, shared_len)
        if body.stream:
            return await open_event_stream(request, _events(context, form, prompt))
        work = context.collect(
            form.request_id, [prompt], lambda outputs: json_response(form.answer(outputs[0])), FIELD_NAMES
        )
        return await until_disconnect(request.receive, work)

    return router


def _turn(turn: SessionTurnInput | None, token_ids: list[int], bos: int | None) -> SessionTurnInput | None:
    """Returns the turn with its opening token, which only a session's first turn starts with: the model's BOS if the
    template writes it once. A repeated BOS is a part of each message (ChatML's `<|im_start|>` in some models)."""
    if turn is None:
        return None
    opening = bos if bos is not None and token_ids.count(bos) == 1 else -1
    return replace(turn, opening=opening)


async def _render_and_encode(
    context: ServerContext, body: ChatBody, tools: ToolRequest | None, formats: ReplyFormats, request_id: str
) -> tuple[ChatText, list[int]]:
    """Renders and tokenizes a conversation, in threads. Raises as `chat_text` does, and `PromptTooLongError` if the
    messages, or the rendered text, cannot fit into the model's context."""
    tokenizer, most = context.client.tokenizer, context.client.model_info.context_length
    characters = body.num_characters()
    check_characters(characters, tokenizer, most, "messages")
    calls = any(message.tool_calls or message.role == "tool" for message in body.messages)
    short_ids = calls and formats.family is not None and formats.family.short_ids
    work = partial(chat_text, tokenizer, body, tools, short_ids=short_ids)
    size = characters + CHARACTERS_PER_MESSAGE * len(body.messages)
    chat = await context.render(work, size=size, request_id=request_id)
    token_ids = await context.encode(chat.text, request_id, add_special_tokens=False, max_tokens=most, param="messages")
    return chat, token_ids


async def _shared_len(
    context: ServerContext,
    body: ChatBody,
    chat: ChatText,
    token_ids: list[int],
    request_id: str,
    beginnings: SharedBeginnings,
) -> int:
    asked = next((message.content for message in body.messages if message.role not in SYSTEM_ROLES), None)
    if isinstance(asked, list):
        asked = next((part.text for part in asked if part.text), None)
    if not asked:
        return 0
    encode = partial(
        context.encode,
        request_id=request_id,
        add_special_tokens=False,
        max_tokens=context.client.model_info.context_length,
        param="messages",
    )
    return await beginnings.count(chat.text, context.client.tokenizer.marked(asked.strip()), token_ids, encode)


async def _events(context: ServerContext, form: ChatFormat, prompt: GenerateInput) -> AsyncGenerator[bytes, None]:
    async with context.generate(form.request_id, [prompt], FIELD_NAMES) as deltas:
        async for _, delta in deltas:
            changes = form.changes(delta)
            if len(changes) == 1:
                yield event(form.chunk(changes, form.usage.so_far(form.body)))
            elif changes:
                usage = form.usage.so_far(form.body)
                yield b"".join([event(form.chunk([change], usage)) for change in changes])
    if form.body.include_usage:
        yield event(form.chunk([], form.usage.total()))
