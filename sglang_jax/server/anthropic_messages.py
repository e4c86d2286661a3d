"""Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta
from sglang_jax.replies.json_scan import json_value
from sglang_jax.server.anthropic_schema import FIELD_NAMES, CountBody, MessagesBody
from sglang_jax.server.blocks import Begin, Block, BlockKind, Blocks, End, More, Step
from sglang_jax.server.context import ServerContext
from sglang_jax.server.conversation import CallOptions, Conversation, Conversations, PlannedReply, ReplyOptions
from sglang_jax.server.error_shapes import anthropic_error
from sglang_jax.server.fields import routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openapi import answers
from sglang_jax.server.streaming import StreamStyle, json_response, named_event, until_disconnect
from sglang_jax.server.tracing import note_response_id


class MessageBlock(msgspec.Struct, kw_only=True, tag_field="type"):
    """A block of a reply's content."""


class TextBlock(MessageBlock, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(MessageBlock, tag="thinking"):
    """The model's thinking. `signature`: some clients send thinking back only if it has one."""

    thinking: str
    signature: str


class ToolUseBlock(MessageBlock, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct, kw_only=True):
    """`input_tokens`: tokens of the prompt that were computed; `cache_read_input_tokens`: those found in the prefix
    cache, null if the caller may not know. What is computed is cached without a wish, so nothing counts as creation."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int | None
    output_tokens: int


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The reply. `stop_reason`: `end_turn`, `stop_sequence`, `tool_use`, `max_tokens`,
    `model_context_window_exceeded`, or `pause_turn` if an operator ended it."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; its `type` says which fields it has."""

    type: str
    message: AnthropicMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class CountedTokens(msgspec.Struct):
    """The number of a prompt's tokens."""

    input_tokens: int


def _event(**fields: Any) -> bytes:
    return named_event(fields["type"], MessageEvent(**fields))


STYLE = StreamStyle("text/event-stream", lambda error: named_event("error", anthropic_error(error)))


@dataclass(slots=True)
class MessagesWriter:
    """Writes the reply to one request."""

    planned: PlannedReply
    body: MessagesBody
    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _blocks: Blocks = field(default_factory=Blocks)
    _number: int = -1
    _last: tuple[str, str | None] = ("end_turn", None)
    _reply: Any = None

    def __post_init__(self) -> None:
        self._reply = self.planned.pieces()

    @property
    def style(self) -> StreamStyle:
        return STYLE

    def whole(self, outputs: Sequence[OutputDelta]) -> Response:
        content = [_whole(step.block) for step in self._steps(outputs[0]) if isinstance(step, End)]
        return json_response(self._message(content, *self._last))

    def events(self, delta: OutputDelta) -> bytes:
        first = b""
        if self._number < 0:
            self._number = 0
            first = _event(type="message_start", message=self._message([], None, None)) + _event(type="ping")
        return first + b"".join(map(self._write, self._steps(delta)))

    def end(self) -> bytes:
        reason, matched = self._last
        delta = {"stop_reason": reason, "stop_sequence": matched}
        return _event(type="message_delta", delta=delta, usage=self._usage()) + _event(type="message_stop")

    def _steps(self, delta: OutputDelta) -> Iterator[Step]:
        yield from self._blocks.add(self._reply.read(delta))
        if delta.finish is not None:
            yield from self._blocks.finish()
            self._last = self._reason(delta.finish, delta.completion_tokens)

    def _write(self, step: Step) -> bytes:
        index = self._number
        match step:
            case Begin(block):
                return _event(type="content_block_start", index=index, content_block=_begun(block))
            case More(block, text):
                return _event(type="content_block_delta", index=index, delta=_grown(block, text))
            case End(block):
                self._number += 1
                signed = b""
                if block.kind is BlockKind.REASONING:
                    delta = {"type": "signature_delta", "signature": _signature(block)}
                    signed = _event(type="content_block_delta", index=index, delta=delta)
                return signed + _event(type="content_block_stop", index=index)

    def _message(
        self, content: list[TextBlock | ThinkingBlock | ToolUseBlock], reason: str | None, matched: str | None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=matched,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        tokens = self.planned.tokens
        return MessageUsage(
            input_tokens=tokens.prompt_tokens - tokens.cached_tokens,
            cache_read_input_tokens=tokens.cached_tokens if tokens.shows_cached else None,
            output_tokens=tokens.completion_tokens,
        )

    def _reason(self, finish: FinishReason, completion_tokens: int) -> tuple[str, str | None]:
        match finish.kind:
            case FinishKind.LENGTH:
                by_limit = completion_tokens >= self.body.max_tokens
                return ("max_tokens" if by_limit else "model_context_window_exceeded"), None
            case FinishKind.STOP if self._reply.called:
                return "tool_use", None
            case FinishKind.STOP if isinstance(finish.matched, str):
                return "stop_sequence", finish.matched
            case FinishKind.STOP:
                return "end_turn", None
        return "pause_turn", None


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


def _signature(block: Block) -> str:
    return hashlib.sha256(block.text.encode()).hexdigest()


def _whole(block: Block) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(text=block.text)
        case BlockKind.REASONING:
            return ThinkingBlock(thinking=block.text, signature=_signature(block))
    arguments = json_value(block.text)
    return ToolUseBlock(id=_call_id(), name=block.name, input=arguments if isinstance(arguments, dict) else {})


def _begun(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": _call_id(), "name": block.name, "input": {}}


def _grown(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def read_conversation(body: MessagesBody, headers: Headers, context: ServerContext) -> Conversation:
    """Returns what a body asks for. Raises `ParameterError`, `UnsupportedParameterError`."""
    return Conversation(
        request_id=body.rid or f"msg_{uuid.uuid4().hex}",
        read=body.conversation,
        num_messages=len(body.messages),
        num_characters=body.num_characters(),
        tools=body.tool_request(context.config.max_tools_per_request),
        variables=body.template_variables(context.client.tokenizer),
        sampling=body.sampling(context.generation_defaults),
        continues=body.continues,
        reply=ReplyOptions(
            stream=bool(body.stream), shows_reasoning=body.thinking is None or body.thinking.display != "omitted"
        ),
        call=CallOptions(
            extra_key=body.extra_key or None,
            priority=body.priority or 0,
            routing_key=routing_key(body.routing_key, headers),
        ),
        field_names=FIELD_NAMES,
    )


def messages_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/messages")
    @answers(AnthropicMessage, MessageEvent)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answers a conversation in the format of Anthropic's Messages API."""
        context.check_model(body.model)
        conversation = read_conversation(body, request.headers, context)
        planned = await until_disconnect(request.receive, conversations.plan(conversation))
        writer = MessagesWriter(planned, body, body.model)
        note_response_id(writer.id)
        return await conversations.answer(request, planned, writer)

    @router.post("/v1/messages/count_tokens")
    @answers(CountedTokens)
    async def count_tokens(body: CountBody, request: Request) -> Response:
        """Counts the tokens of a conversation's prompt, without a reply."""
        context.check_model(body.model)
        counted = MessagesBody(**body.__dict__, max_tokens=1)
        conversation = read_conversation(counted, request.headers, context)
        conversations.formats.check(conversation.tools)
        _, token_ids = await until_disconnect(request.receive, conversations.encode(conversation))
        return json_response(CountedTokens(len(token_ids)))

    return router
