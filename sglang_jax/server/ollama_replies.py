"""`POST /api/chat` and `POST /api/generate` of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from starlette.datastructures import Headers

from sglang_jax.engine.types import GenerateInput, OutputDelta
from sglang_jax.errors import PromptTooLongError
from sglang_jax.replies.json_scan import json_value
from sglang_jax.replies.parser import CallArguments, CallBegin, Reasoning, Text
from sglang_jax.server.callers import current_caller
from sglang_jax.server.chat_replies import ReplyPlan
from sglang_jax.server.context import ServerContext, new_id
from sglang_jax.server.conversation import (
    CallOptions,
    Conversation,
    Conversations,
    PlannedReply,
    RenderedChat,
    ReplyOptions,
    ReplyPieces,
    thinking_variables,
)
from sglang_jax.server.error_shapes import ollama_error
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.logprobs import ChatLogprob, chat_logprobs
from sglang_jax.server.ollama_schema import FIELD_NAMES, OllamaBody, OllamaChatBody, OllamaPromptBody
from sglang_jax.server.openapi import JSON_LINES, answers
from sglang_jax.server.streaming import StreamStyle, json_line, json_response, until_disconnect
from sglang_jax.server.token_count import TokenCount

LOADED = "load"
"""The `done_reason` of an answer to a request without a prompt, which asks to load the model: it is loaded already."""

NANOSECONDS = 10**9

STYLE = StreamStyle(JSON_LINES, lambda error: json_line(ollama_error(error)))


class OllamaFunction(msgspec.Struct, kw_only=True):
    """The function of a call. `index`: the number of the call in the reply."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, kw_only=True):
    """A complete tool call."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """The model's message; in a stream, its next part."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """The reply, or one line of its stream. Durations are in nanoseconds. `done_reason` (`stop`, `length`, `abort`, or
    `load` without a prompt), durations and counts are only in the last line, where `done` is true."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChat(OllamaReply, kw_only=True):
    """The reply of a chat, or one line of its stream."""

    message: OllamaMessage


class OllamaCompletion(OllamaReply, kw_only=True):
    """The reply to a prompt, or one line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class ReplyForm(Protocol):
    """Puts a part of a reply into the shape of its route."""

    def __call__(self, message: OllamaMessage, **fields: Any) -> OllamaReply: ...


def as_chat(message: OllamaMessage, **fields: Any) -> OllamaReply:
    return OllamaChat(message=message, **fields)


def as_completion(message: OllamaMessage, **fields: Any) -> OllamaReply:
    return OllamaCompletion(response=message.content, thinking=message.thinking, **fields)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def loaded(body: OllamaBody, form: ReplyForm) -> Response:
    """Returns the answer to a request that asks to load the model."""
    return json_response(form(OllamaMessage(), model=body.model, created_at=_now(), done=True, done_reason=LOADED))


@dataclass(slots=True)
class OllamaWriter:
    """Writes the reply to one request. `started`: when the request arrived, by `time.monotonic()`."""

    planned: PlannedReply
    body: OllamaBody
    context: ServerContext
    form: ReplyForm
    started: float
    _pieces: ReplyPieces = field(init=False)
    _first_at: float | None = None
    _call: tuple[str, list[str]] | None = None
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self._pieces = self.planned.pieces()

    @property
    def style(self) -> StreamStyle:
        return STYLE

    def whole(self, outputs: Sequence[OutputDelta]) -> Response:
        [output] = outputs
        return json_response(self._line(self._message(output), output, done=True))

    def events(self, delta: OutputDelta) -> bytes:
        now = time.monotonic()
        self._first_at = now if self._first_at is None else self._first_at
        message = self._message(delta)
        lines = b""
        if message.content or message.thinking or message.tool_calls or delta.logprobs:
            lines = json_line(self._line(message, delta, done=False))
        if delta.finish is not None:
            last = msgspec.structs.replace(delta, logprobs=())  # which an earlier line has
            lines += json_line(self._line(OllamaMessage(), last, done=True))
        return lines

    def end(self) -> bytes:
        return b""

    def _message(self, delta: OutputDelta) -> OllamaMessage:
        """Returns the next part. A call is in the part in which it is complete; one that is cut short is left out."""
        content, thinking = "", ""
        calls: list[OllamaCall] = []
        for piece in self._pieces.read(delta):
            match piece:
                case Text(text):
                    content += text
                case Reasoning(text):
                    thinking += text
                case CallBegin(name=name):
                    self._end_call(calls)
                    self._call = (name, [])
                case CallArguments(text=text):
                    assert self._call is not None, "arguments follow the beginning of their call"
                    self._call[1].append(text)
        if delta.finish is not None:
            self._end_call(calls)
        return OllamaMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)

    def _end_call(self, calls: list[OllamaCall]) -> None:
        if self._call is None:
            return
        name, parts = self._call
        self._call = None
        arguments = json_value("".join(parts))
        if isinstance(arguments, dict):
            function = OllamaFunction(index=self._num_calls, name=name, arguments=arguments)
            calls.append(OllamaCall(id=self.planned.plan.call_id(), function=function))
            self._num_calls += 1

    def _line(self, message: OllamaMessage, delta: OutputDelta, *, done: bool) -> OllamaReply:
        fields: dict[str, Any] = {"model": self.body.model, "created_at": _now(), "done": done}
        if self.body.logprobs and delta.logprobs:
            fields["logprobs"] = chat_logprobs(self.context.client.tokenizer, delta.logprobs).content
        if done and delta.finish is not None:
            fields |= {"done_reason": delta.finish.kind.value, **self._totals(delta)}
        return self.form(message, **fields)

    def _totals(self, last: OutputDelta) -> dict[str, int]:
        """Returns durations and counts. If it is not known when the first token was sampled, all time is that of the
        output."""
        now = time.monotonic()
        first = last.sampled[0] if last.sampled is not None else self._first_at or self.started
        first = min(max(first, self.started), now)
        return {
            "total_duration": _nanoseconds(now - self.started),
            "load_duration": 0,
            "prompt_eval_count": self.planned.tokens.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - self.started),
            "eval_count": self.planned.tokens.completion_tokens,
            "eval_duration": max(_nanoseconds(now - first), 1),  # clients divide by it
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


def _reply_options(body: OllamaBody) -> ReplyOptions:
    body.check_logprobs()
    return ReplyOptions(
        stream=body.streams,
        shows_reasoning=body.thinks is not False,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
    )


def read_conversation(
    body: OllamaChatBody | OllamaPromptBody, headers: Headers, context: ServerContext, conversations: Conversations
) -> Conversation:
    """Returns what a body asks for. Raises `ParameterError`, `UnsupportedParameterError`."""
    if body.thinks and conversations.formats.reasoning is None:
        raise UnsupportedParameterError(
            "think is not supported, because this server was started without --reasoning-parser, which separates "
            f"thinking from replies; remove it (got {body.think})",
            param="think",
        )
    tokenizer = context.client.tokenizer

    def read() -> list[dict[str, object]]:
        messages = body.conversation()
        tokenizer.check_roles([message["role"] for message in messages])
        return messages

    return Conversation(
        request_id=new_id("chat"),
        read=read,
        num_messages=body.num_messages,
        num_characters=body.num_characters(),
        tools=body.tool_request(context.config.max_tools_per_request),
        variables=thinking_variables(tokenizer, thinks=body.thinks, effort=body.effort),
        sampling=body.chosen_options().sampling(body.grammar(), context.generation_defaults),
        reply=_reply_options(body),
        call=CallOptions(routing_key=routing_key(None, headers)),
        field_names={**FIELD_NAMES, "prompt": body.prompt_field},
    )


async def plan_raw(body: OllamaPromptBody, headers: Headers, context: ServerContext) -> PlannedReply:
    """Returns the plan to continue a prompt that is not a conversation. Raises `RequestError`."""
    body.check_raw()
    prompt = body.prompt or ""
    request_id, most = new_id("generate"), context.client.model_info.context_length
    sampling = body.chosen_options().sampling(body.grammar(), context.generation_defaults)
    reply, key = _reply_options(body), routing_key(None, headers)
    token_ids = await context.encode(prompt, request_id, add_special_tokens=True, max_tokens=most, param="prompt")
    conversation = Conversation(
        request_id=request_id,
        read=body.conversation,
        num_messages=body.num_messages,
        num_characters=len(prompt),
        sampling=sampling,
        field_names={**FIELD_NAMES, "prompt": body.prompt_field},
        reply=reply,
        call=CallOptions(routing_key=key),
    )
    given = GenerateInput(
        prompt=token_ids,
        sampling=sampling,
        request_id=request_id,
        stream=reply.stream,
        return_logprob=reply.logprobs,
        top_logprobs_num=reply.top_logprobs,
        routing_key=key,
    )
    plan = ReplyPlan(grammar=sampling.grammar)
    return PlannedReply(conversation, RenderedChat(prompt), plan, given, TokenCount(current_caller()))


def within_context(planned: PlannedReply, num_ctx: int | None) -> PlannedReply:
    """Returns the plan with prompt and output limited to `num_ctx` tokens together. Raises `PromptTooLongError`."""
    if num_ctx is None:
        return planned
    left = num_ctx - len(planned.prompt.prompt)
    if left < 1:
        raise PromptTooLongError(
            f"the prompt has {len(planned.prompt.prompt)} tokens, and options.num_ctx is {num_ctx}, which leaves no "
            "room for an output",
            param="options.num_ctx",
        )
    sampling = planned.prompt.sampling
    limit = left if sampling.max_new_tokens is None else min(left, sampling.max_new_tokens)
    return replace(planned, prompt=replace(planned.prompt, sampling=replace(sampling, max_new_tokens=limit)))


def ollama_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute, strict_content_type=False)

    @router.post("/api/chat")
    @answers(OllamaChat, OllamaChat, JSON_LINES)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
        """Answers a conversation in the format of Ollama's API. Streams by default."""
        started = time.monotonic()
        check(body)
        if not body.messages:
            return loaded(body, as_chat)
        conversation = read_conversation(body, request.headers, context, conversations)
        planned = await until_disconnect(request.receive, conversations.plan(conversation))
        return await answer(body, request, planned, as_chat, started)

    @router.post("/api/generate")
    @answers(OllamaCompletion, OllamaCompletion, JSON_LINES)
    async def ollama_generate(body: OllamaPromptBody, request: Request) -> Response:
        """Answers a prompt in the format of Ollama's API. Streams by default."""
        started = time.monotonic()
        check(body)
        if not body.prompt:
            return loaded(body, as_completion)
        if body.raw:
            planning = plan_raw(body, request.headers, context)
        else:
            planning = conversations.plan(read_conversation(body, request.headers, context, conversations))
        planned = await until_disconnect(request.receive, planning)
        return await answer(body, request, planned, as_completion, started)

    def check(body: OllamaBody) -> None:
        context.check_model(body.model_name)
        body.chosen_options().check_context(context.client.model_info.context_length)

    async def answer(
        body: OllamaBody, request: Request, planned: PlannedReply, form: ReplyForm, started: float
    ) -> Response:
        planned = within_context(planned, body.chosen_options().num_ctx)
        return await conversations.answer(request, planned, OllamaWriter(planned, body, context, form, started))

    return router
