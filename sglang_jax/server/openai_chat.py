"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta, TextTokenizer
from sglang_jax.replies.parser import CallArguments, CallBegin, Piece, Reasoning, Text
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.server.context import ENGINE_NAMES, ServerContext, new_id
from sglang_jax.server.conversation import (
    CallOptions,
    Conversation,
    Conversations,
    PlannedReply,
    ReplyOptions,
    ReplyPieces,
)
from sglang_jax.server.fields import routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import ChatLogprobs, chat_logprobs
from sglang_jax.server.openai_schema import ChatBody
from sglang_jax.server.openai_usage import Usage, usage_of, usage_so_far, weights_metadata
from sglang_jax.server.openapi import answers
from sglang_jax.server.sampling import OPENAI_NAMES, openai_sampling
from sglang_jax.server.streaming import OPENAI_EVENTS, StreamStyle, event, json_response, until_disconnect

FIELD_NAMES = {
    **ENGINE_NAMES,
    **OPENAI_NAMES,
    "prompt": "messages",
    "continues": "continue_final_message",
    "top_logprobs_num": "top_logprobs",
}


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
    metadata: dict[str, str]


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
class ChatWriter:
    """Writes the replies to one request."""

    planned: PlannedReply
    body: ChatBody
    context: ServerContext
    created: int = field(default_factory=lambda: int(time.time()))
    _replies: dict[int, ReplyPieces] = field(default_factory=dict)

    @property
    def style(self) -> StreamStyle:
        return OPENAI_EVENTS

    def whole(self, outputs: Sequence[OutputDelta]) -> Response:
        choices = []
        for output in outputs:
            assert output.finish is not None
            reply = self.planned.pieces()
            choices.append(
                ChatChoice(
                    index=output.index,
                    message=self._message(reply.read(output)),
                    logprobs=self._logprobs(output) if self.body.logprobs else None,
                    finish_reason=_reason(output.finish, reply),
                    matched_stop=output.finish.matched,
                )
            )
        return json_response(
            ChatCompletion(
                id=self.planned.conversation.request_id,
                created=self.created,
                model=self.context.config.model_name,
                choices=choices,
                usage=usage_of(self.planned.tokens),
                metadata=weights_metadata(outputs),
            )
        )

    def _message(self, pieces: Sequence[Piece]) -> AnswerMessage:
        content, reasoning = "", ""
        calls: list[Call] = []
        for piece in pieces:
            match piece:
                case Text():
                    content += piece.text
                case Reasoning():
                    reasoning += piece.text
                case CallBegin():
                    function = CalledFunction(name=piece.name, arguments="")
                    calls.append(Call(id=self.planned.plan.call_id(), function=function))
                case CallArguments():
                    calls[piece.index].function.arguments += piece.text
        return AnswerMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def events(self, delta: OutputDelta) -> bytes:
        changes = self._changes(delta)
        usage = usage_so_far(self.planned.tokens, self.body)
        if len(changes) == 1:
            return event(self._chunk(changes, usage))
        return b"".join([event(self._chunk([change], usage)) for change in changes])

    def end(self) -> bytes:
        return event(self._chunk([], usage_of(self.planned.tokens))) if self.body.include_usage else b""

    def _changes(self, delta: OutputDelta) -> list[ChunkChoice]:
        """Returns the chunks for a delta: the role, then text, reasoning and calls, and finally the finish reason."""
        index, finish = delta.index, delta.finish
        deltas: list[Delta] = []
        if index not in self._replies:
            self._replies[index] = self.planned.pieces()
            deltas.append(Delta(role="assistant", content=""))
        first_content = len(deltas)
        reply = self._replies[index]
        deltas += self._deltas(reply.read(delta))
        if self.body.logprobs and delta.logprobs and first_content == len(deltas):
            deltas.append(Delta(content=""))
        changes = [ChunkChoice(index=index, delta=one) for one in deltas]
        if self.body.logprobs and delta.logprobs:
            changes[first_content].logprobs = self._logprobs(delta)
        if finish is not None:
            reason = _reason(finish, reply)
            changes.append(ChunkChoice(index=index, delta=Delta(), finish_reason=reason, matched_stop=finish.matched))
        return changes

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs:
        return chat_logprobs(self.context.client.tokenizer, delta.logprobs)

    def _deltas(self, pieces: Sequence[Piece]) -> list[Delta]:
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
                    call_id = self.planned.plan.call_id()
                    call = CallDelta(index=piece.index, id=call_id, type="function", function=function)
                    deltas.append(Delta(tool_calls=[call]))
                case CallArguments():
                    if call is None:  # started in an earlier delta
                        call = CallDelta(index=piece.index, function=CalledFunction(arguments=""))
                        deltas.append(Delta(tool_calls=[call]))
                    call.function.arguments += piece.text
        return deltas

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self.planned.conversation.request_id,
            created=self.created,
            model=self.context.config.model_name,
            choices=choices,
            usage=usage,
        )


def _reason(finish: FinishReason, reply: ReplyPieces) -> str:
    """Returns OpenAI's finish reason, after the whole reply has been read."""
    return "tool_calls" if reply.called and finish.kind is FinishKind.STOP else finish.kind.value


def read_conversation(
    body: ChatBody, headers: Headers, tokenizer: TextTokenizer, defaults: GenerationDefaults, max_tools: int
) -> Conversation:
    """Returns what a body asks for. `defaults`: for sampling fields that it leaves out. Raises `ParameterError`,
    `UnsupportedParameterError`."""
    body.check_logprobs()
    return Conversation(
        request_id=body.rid or new_id("chatcmpl"),
        read=partial(body.conversation, tokenizer),
        num_messages=len(body.messages),
        num_characters=body.num_characters(),
        tools=body.tool_request(max_tools),
        variables=body.template_variables(tokenizer),
        sampling=openai_sampling(body, body.token_limit(), defaults),
        continues=bool(body.continue_final_message),
        reply=ReplyOptions(
            stream=bool(body.stream),
            separate=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
            shows_reasoning=body.shows_reasoning,
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        ),
        call=CallOptions(
            extra_key=body.cache_namespace,
            priority=body.priority or 0,
            routing_key=routing_key(body.routing_key, headers),
            session=body.session,
        ),
        field_names=FIELD_NAMES,
    )


def chat_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    client, max_tools = context.client, context.config.max_tools_per_request

    @router.post("/v1/chat/completions")
    @answers(ChatCompletion, ChatChunk)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        context.check_model(body.model)
        conversation = read_conversation(
            body, request.headers, client.tokenizer, context.generation_defaults, max_tools
        )
        planned = await until_disconnect(request.receive, conversations.plan(conversation))
        return await conversations.answer(request, planned, ChatWriter(planned, body, context))

    return router
