"""Conversations, in no dialect's terms. A dialect reads a client's body to a `Conversation`, and writes the reply in
its own format. What lies between is here: rendering and tokenizing, the plan of the reply, its pieces as they
arrive."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from fastapi import Request, Response

from sglang_jax.checkpoint.chat_contents import JoinedParts
from sglang_jax.checkpoint.chat_tools import template_names
from sglang_jax.engine.types import GenerateInput, OutputDelta, SessionTurnInput, TextTokenizer
from sglang_jax.engine.validation import check_characters
from sglang_jax.errors import ParameterError
from sglang_jax.replies.parser import Piece, Text
from sglang_jax.sampling import SamplingParams
from sglang_jax.server.callers import current_caller
from sglang_jax.server.chat_replies import ReplyFormats, ReplyPlan, ReplyReader, with_grammar
from sglang_jax.server.context import ServerContext
from sglang_jax.server.shared_beginnings import SharedBeginnings
from sglang_jax.server.streaming import StreamStyle, open_event_stream, until_disconnect
from sglang_jax.server.token_count import TokenCount
from sglang_jax.server.tools import ToolRequest, with_short_ids

SYSTEM_ROLES = ("system", "developer")

CHARACTERS_PER_MESSAGE = 256
"""Rendering a message takes about as long as this many of its characters."""

Message = dict[str, object]
"""A message in the format of chat templates: OpenAI's, with calls' `arguments` as text or as an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How a client wants the reply.

    - `separate`: reasoning is not part of the text; `stream_reasoning`: it may come in several pieces;
      `shows_reasoning`: the reply has it at all.
    - `logprobs`, `top_logprobs`: whether each token has its logprob, and the number of alternatives.
    """

    stream: bool = False
    separate: bool = True
    stream_reasoning: bool = True
    shows_reasoning: bool = True
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Fields of `GenerateInput` that clients of every dialect may set."""

    extra_key: str | None = None
    priority: int = 0
    routing_key: str | None = None
    session: SessionTurnInput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a client sends for one reply.

    - `read`: returns the messages; runs in the thread that renders them, because there may be thousands. Raises
      `ParameterError`.
    - `num_messages`, `num_characters`: of all messages.
    - `variables`: further inputs of the chat template.
    - `continues`: the reply continues the last message, which must be the assistant's.
    - `field_names`: the dialect's names of the engine's fields, for errors; `prompt` is the field of the messages,
      `continues` the one that asks for a continuation.
    """

    request_id: str
    read: Callable[[], list[Message]]
    num_messages: int
    num_characters: int
    sampling: SamplingParams
    field_names: Mapping[str, str]
    tools: ToolRequest | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    continues: bool = False
    reply: ReplyOptions = ReplyOptions()
    call: CallOptions = CallOptions()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it. `continued`: the assistant's message that the reply continues, if any;
    `first_text`: the first text that is not the system's, as the template got it; empty if there is none."""

    text: str
    continued: str | None = None
    first_text: str = ""


def render(
    tokenizer: TextTokenizer, conversation: Conversation, call_ids_are_short: Callable[[], bool] = lambda: False
) -> RenderedChat:
    """Renders the conversation up to where the reply starts or continues. `call_ids_are_short`: whether the template
    requires call ids of nine letters and digits. Raises `ParameterError`; `RequestError` if the template refuses the
    messages."""
    messages = conversation.read()
    if any("tool_calls" in message or message["role"] == "tool" for message in messages) and call_ids_are_short():
        messages = [with_short_ids(message) for message in messages]
    offered = () if conversation.tools is None else conversation.tools.for_template
    first = tokenizer.marked(_first_text(messages).strip())
    if not conversation.continues:
        text = tokenizer.render_chat(messages, tools=offered, variables=conversation.variables)
        return RenderedChat(text, first_text=first)
    *earlier, last = messages
    said = str(last["content"])
    param = conversation.field_names["continues"]
    if last["role"] != "assistant" or not said.strip() or "tool_calls" in last:
        raise ParameterError(
            f"{param} needs a last message with role assistant, with text and without tool calls", param=param
        )
    # A random word marks the text's end, which the template may repeat later, and shows whether it keeps white space.
    end, spaces = secrets.token_hex(16), "\t \t"
    text = tokenizer.render_chat(
        [*earlier, {**last, "content": f"{said}{end}{spaces}"}],
        add_generation_prompt=False,
        tools=offered,
        variables=conversation.variables,
    )
    keeps_spaces = f"{end}{spaces}" in text
    text = text[: max(text.rfind(end), 0)]
    if not keeps_spaces:
        text, said = text.rstrip(), said.rstrip()
    if not text.endswith(tokenizer.marked(said.lstrip())):
        raise ParameterError("the chat template changes the last message, so it cannot be continued", param=param)
    return RenderedChat(text, said, first)


def thinking_variables(tokenizer: TextTokenizer, *, thinks: bool | None, effort: str | None) -> dict[str, object]:
    """Returns the variables by which the chat template turns thinking on or off and sets its effort. What the template
    does not have is left out: the model then thinks as it always does. None: not said."""
    names = template_names(tokenizer.chat_template)
    wanted: dict[str, object] = {}
    if thinks is not None:
        wanted |= dict.fromkeys(("enable_thinking", "thinking"), thinks)
    if effort is not None:
        wanted["reasoning_effort"] = effort
    return {name: value for name, value in wanted.items() if name in names}


def _first_text(messages: Iterable[Message]) -> str:
    content = next((message["content"] for message in messages if message["role"] not in SYSTEM_ROLES), "")
    if isinstance(content, JoinedParts):
        return next((part for part in content.parts if part), "")
    return content if isinstance(content, str) else ""


@dataclass(frozen=True, slots=True)
class PlannedReply:
    """A conversation that is ready for the engine. `rendered`: as the model reads it; `plan`: how its replies are
    sampled and parsed; `tokens`: counts the tokens of the request's replies."""

    conversation: Conversation
    rendered: RenderedChat
    plan: ReplyPlan
    prompt: GenerateInput
    tokens: TokenCount

    def pieces(self) -> ReplyPieces:
        """Returns the parser of one reply."""
        return ReplyPieces(self.plan.reader())


Finished = Callable[[], Awaitable[None]]


async def do_nothing() -> None:
    pass


class Conversations:
    """The way of all dialects' conversations to the engine."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._beginnings = SharedBeginnings()

    @cached_property
    def formats(self) -> ReplyFormats:
        """The formats of the model's replies; created at the first use, because it reads the chat template."""
        return ReplyFormats(self._context.config, self._context.client.tokenizer)

    async def encode(self, conversation: Conversation) -> tuple[RenderedChat, list[int]]:
        """Renders and tokenizes a conversation, in threads. Raises as `render` does, and `PromptTooLongError` if the
        messages, or the rendered text, cannot fit into the model's context."""
        context, request_id = self._context, conversation.request_id
        tokenizer, most = context.client.tokenizer, context.client.model_info.context_length
        param = conversation.field_names["prompt"]
        check_characters(conversation.num_characters, tokenizer, most, param)
        work = partial(render, tokenizer, conversation, self._call_ids_are_short)
        size = conversation.num_characters + CHARACTERS_PER_MESSAGE * conversation.num_messages
        rendered = await context.render(work, size=size, request_id=request_id)
        encoding = context.encode(rendered.text, request_id, add_special_tokens=False, max_tokens=most, param=param)
        return rendered, await encoding

    async def plan(self, conversation: Conversation) -> PlannedReply:
        """Renders, tokenizes and plans a conversation. Raises `RequestError`."""
        self.formats.check(conversation.tools)
        rendered, token_ids = await self.encode(conversation)
        reply, call = conversation.reply, conversation.call
        plan = self.formats.plan(
            rendered.text,
            conversation.sampling,
            conversation.tools,
            continued=rendered.continued,
            separate=reply.separate,
            stream_reasoning=reply.stream_reasoning,
            shows_reasoning=reply.shows_reasoning,
        )
        model = self._context.client.model_info
        shared_len = 0
        if model.keeps_states and (call.session is None or call.session.whole):
            shared_len = await self._shared_len(conversation, rendered, token_ids)
        prompt = GenerateInput(
            prompt=token_ids,
            sampling=with_grammar(conversation.sampling, plan),
            request_id=conversation.request_id,
            stream=reply.stream,
            return_logprob=reply.logprobs,
            top_logprobs_num=reply.top_logprobs,
            extra_key=call.extra_key,
            priority=call.priority,
            routing_key=call.routing_key,
            session=_with_opening(call.session, token_ids, model.bos_token_id),
            markers=plan.markers,
            continues_text=conversation.continues,
            shared_len=shared_len,
        )
        return PlannedReply(conversation, rendered, plan, prompt, TokenCount(current_caller()))

    def _call_ids_are_short(self) -> bool:
        return self.formats.family is not None and self.formats.family.short_ids

    async def _shared_len(self, conversation: Conversation, rendered: RenderedChat, token_ids: list[int]) -> int:
        if not rendered.first_text:
            return 0
        encode = partial(
            self._context.encode,
            request_id=conversation.request_id,
            add_special_tokens=False,
            max_tokens=self._context.client.model_info.context_length,
            param=conversation.field_names["prompt"],
        )
        return await self._beginnings.count(rendered.text, rendered.first_text, token_ids, encode)

    async def answer(
        self, request: Request, planned: PlannedReply, writer: ReplyWriter, finished: Finished = do_nothing
    ) -> Response:
        """Generates the replies, and returns them as `writer` formats them: whole, or as a stream. `finished` is
        awaited when the writer has all of the replies, before their end is sent. Raises `RequestError`."""
        conversation = planned.conversation
        if conversation.reply.stream:
            return await open_event_stream(request, self.events(planned, writer, finished), writer.style)

        def write(outputs: list[list[OutputDelta]]) -> Response:
            for output in outputs[0]:
                planned.tokens.add(0, output)
            return writer.whole(outputs[0])

        async def work() -> Response:
            response = await self._context.collect(
                conversation.request_id, [planned.prompt], write, conversation.field_names
            )
            await finished()
            return response

        return await until_disconnect(request.receive, work())

    async def events(
        self, planned: PlannedReply, writer: ReplyWriter, finished: Finished = do_nothing
    ) -> AsyncGenerator[bytes, None]:
        """Generates the replies, and yields the events of their stream; see `answer`."""
        conversation = planned.conversation
        async with self._context.generate(
            conversation.request_id, [planned.prompt], conversation.field_names
        ) as deltas:
            async for _, delta in deltas:
                planned.tokens.add(0, delta)
                if written := writer.events(delta):
                    yield written
        await finished()
        if last := writer.end():
            yield last


def _with_opening(turn: SessionTurnInput | None, token_ids: list[int], bos: int | None) -> SessionTurnInput | None:
    """Returns the turn with its opening token, which only a session's first turn starts with: the model's BOS if the
    template writes it once. A repeated BOS is a part of each message (ChatML's `<|im_start|>` in some models)."""
    if turn is None:
        return None
    opening = bos if bos is not None and token_ids.count(bos) == 1 else -1
    return replace(turn, opening=opening)


class ReplyWriter(Protocol):
    """A dialect's format of the replies to one request. `style`: how its stream carries events, an error and the
    end."""

    @property
    def style(self) -> StreamStyle: ...

    def whole(self, outputs: Sequence[OutputDelta]) -> Response:
        """Returns the finished replies, one for each output."""
        ...

    def events(self, delta: OutputDelta) -> bytes:
        """Returns the next events of a stream; empty if the delta shows nothing."""
        ...

    def end(self) -> bytes:
        """Returns the last events, after all replies have finished; empty if there are none."""
        ...


@dataclass(slots=True)
class ReplyPieces:
    """The pieces of one reply as it arrives. `reader`: None if the reply is text that is not parsed."""

    reader: ReplyReader | None

    def read(self, delta: OutputDelta) -> Sequence[Piece]:
        """Returns the pieces that are certain with the next delta; with the last delta, all of the rest."""
        if self.reader is not None:
            return self.reader.read(delta.text, finished=delta.finish is not None)
        return (Text(delta.text),) if delta.text else ()

    @property
    def called(self) -> bool:
        """Whether the reply has called tools and does not end within a call."""
        return self.reader is not None and self.reader.called
