"""The replies and events of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType

from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta, TextTokenizer
from sglang_jax.errors import RequestError
from sglang_jax.server.blocks import Begin, Block, BlockKind, Blocks, End, More, Step
from sglang_jax.server.conversation import PlannedReply
from sglang_jax.server.logprobs import ChatLogprob, chat_logprobs
from sglang_jax.server.responses_items import encoded
from sglang_jax.server.responses_schema import ResponsesBody, WantedReply
from sglang_jax.server.streaming import StreamStyle, json_response, named_event

RESPONSE_ID = "resp_"


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: tokens found in the prefix cache; 0 if the caller may not know."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: estimated by the reasoning's share of the output's characters."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. `status`: `queued`, `in_progress`, `completed`, `incomplete`, `cancelled` or `failed`."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream; its `type` says which fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: dict[str, Any] | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: dict[str, Any] | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


def new_response(response_id: str, body: ResponsesBody, planned: PlannedReply, model: str) -> ResponseObject:
    """Returns a response that has just started, with the fields of its request."""
    sampling, form = planned.conversation.sampling, None if body.text is None else body.text.format
    text = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    asked = body.reasoning
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": asked.effort, "summary": asked.summary} if asked else {"effort": None, "summary": None},
        safety_identifier=body.safety_identifier,
        store=body.stores,
        temperature=sampling.temperature,
        text={"format": text, "verbosity": (body.text.verbosity if body.text else None) or "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=[{"strict": False, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


@dataclass(slots=True)
class ResponseWriter:
    """Writes one response: its items, and the events of its stream. `response` has what is known so far."""

    planned: PlannedReply
    wanted: WantedReply
    tokenizer: TextTokenizer
    response: ResponseObject
    _blocks: Blocks = field(default_factory=Blocks)
    _sequence: int = 0
    _reply: Any = None
    _characters: Counter[BlockKind] = field(default_factory=Counter)
    _logprobs: list[ChatLogprob] = field(default_factory=list)
    _new_logprobs: list[ChatLogprob] = field(default_factory=list)
    _cut: bool = False
    _runs: bool = False

    def __post_init__(self) -> None:
        self._reply = self.planned.pieces()

    @property
    def style(self) -> StreamStyle:
        return StreamStyle("text/event-stream", self.failed)

    def whole(self, outputs: Sequence[OutputDelta]) -> Response:
        for output in outputs:
            for step in self._steps(output):
                self._note(step)
        return json_response(self.response)

    def events(self, delta: OutputDelta) -> bytes:
        first = b"" if self._runs else self._begin()
        written = b"".join(event for step in self._steps(delta) for event in self._write(step))
        return first + written

    def queued(self) -> bytes:
        """Returns the first events of a response that waits in the background."""
        return self._of_response("response.created") + self._of_response("response.queued")

    def _begin(self) -> bytes:
        self.response.status, self._runs = "in_progress", True
        created = self._of_response("response.created") if self._sequence == 0 else b""
        return created + self._of_response("response.in_progress")

    def end(self) -> bytes:
        return self._of_response(f"response.{self.response.status}")

    def failed(self, error: RequestError) -> bytes:
        """Returns the last events of a stream that fails."""
        self.fail(error)
        what = self._event("error", code=error.code, message=error.message, param=error.param)
        return what + self._of_response("response.failed")

    def fail(self, error: RequestError) -> None:
        self.response.status = "failed"
        self.response.error = {"code": error.code, "message": error.message}

    def cancel(self) -> None:
        self.response.status = "cancelled"
        for item in self.response.output[-1:]:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"

    def _steps(self, delta: OutputDelta) -> Iterator[Step]:
        if self.wanted.logprobs and delta.logprobs:
            self._new_logprobs = [*self._new_logprobs, *chat_logprobs(self.tokenizer, delta.logprobs).content]
        yield from self._blocks.add(self._reply.read(delta))
        if delta.finish is not None:
            self._cut = delta.finish.kind is not FinishKind.STOP
            yield from self._blocks.finish()
            self._finish(delta.finish)

    def _finish(self, finish: FinishReason) -> None:
        response, tokens = self.response, self.planned.tokens
        match finish.kind:
            case FinishKind.LENGTH:
                response.status, response.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
            case FinishKind.STOP:
                response.status, response.completed_at = "completed", int(time.time())
            case _:
                self.cancel()
        response.usage = ResponseUsage(
            tokens.prompt_tokens,
            InputTokensDetails(tokens.cached_tokens),
            tokens.completion_tokens,
            OutputTokensDetails(self._reasoning_tokens(tokens.completion_tokens)),
            tokens.prompt_tokens + tokens.completion_tokens,
        )

    def _reasoning_tokens(self, completion_tokens: int) -> int:
        share = self._characters[BlockKind.REASONING] / max(self._characters.total(), 1)
        return round(completion_tokens * share)

    def _note(self, step: Step) -> None:
        """Keeps what a step adds to the response's output."""
        match step:
            case Begin(block):
                self.response.output.append(self._begun(block))
            case More(block):
                if block.kind is BlockKind.TEXT:
                    self._logprobs += self._new_logprobs
                self._new_logprobs = []
            case End(block):
                self._logprobs += self._new_logprobs
                self.response.output[-1] |= self._ended(block)

    def _write(self, step: Step) -> Iterator[bytes]:
        """Yields a step's events."""
        new = self._new_logprobs
        self._note(step)
        place = len(self.response.output) - 1
        item = self.response.output[place]
        at = {"output_index": place, "item_id": item["id"]}
        kind = step.block.kind
        match step:
            case Begin(block):
                yield self._event("response.output_item.added", output_index=place, item=item)
                if kind is not BlockKind.CALL:
                    yield self._of_part("added", at, self._part(block, ""))
            case More(block, text):
                more: dict[str, Any] = {"logprobs": new} if kind is BlockKind.TEXT else {}
                yield self._event(f"{self._grows(kind)}.delta", **self._within(at, kind), delta=text, **more)
            case End(block):
                yield from self._close(at, block, item)

    def _close(self, at: dict[str, Any], block: Block, item: dict[str, Any]) -> Iterator[bytes]:
        kind = block.kind
        done: dict[str, Any] = {"text": block.text}
        if kind is BlockKind.CALL:
            done = {"arguments": block.text, "name": block.name}
        elif kind is BlockKind.TEXT:
            done["logprobs"] = item["content"][0].get("logprobs", [])
        yield self._event(f"{self._grows(kind)}.done", **self._within(at, kind), **done)
        if kind is not BlockKind.CALL:
            yield self._of_part("done", at, self._part(block, block.text))
        yield self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _grows(self, kind: BlockKind) -> str:
        """The events by which a block of this kind grows, without `delta` or `done`."""
        match kind:
            case BlockKind.TEXT:
                return "response.output_text"
            case BlockKind.CALL:
                return "response.function_call_arguments"
        return "response.reasoning_summary_text" if self.wanted.summary else "response.reasoning_text"

    def _within(self, at: dict[str, Any], kind: BlockKind) -> dict[str, Any]:
        if kind is BlockKind.CALL:
            return at
        summary = kind is BlockKind.REASONING and self.wanted.summary
        return {**at, ("summary_index" if summary else "content_index"): 0}

    def _of_part(self, what: str, at: dict[str, Any], part: dict[str, Any]) -> bytes:
        if part["type"] == "summary_text":
            return self._event(f"response.reasoning_summary_part.{what}", **at, summary_index=0, part=part)
        return self._event(f"response.content_part.{what}", **at, content_index=0, part=part)

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind is BlockKind.REASONING:
            return {"type": "summary_text" if self.wanted.summary else "reasoning_text", "text": text}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self.wanted.logprobs:
            part["logprobs"] = list(self._logprobs) if text else []
        return part

    def _begun(self, block: Block) -> dict[str, Any]:
        """Returns a new item. Its id names the response and its place, so that later requests can refer to it."""
        place = f"{self.response.id.removeprefix(RESPONSE_ID)}_{len(self.response.output)}"
        self._logprobs = []
        match block.kind:
            case BlockKind.TEXT:
                item = {"id": f"msg_{place}", "type": "message", "role": "assistant", "content": []}
            case BlockKind.REASONING:
                item = {"id": f"rs_{place}", "type": "reasoning", "summary": []}
            case BlockKind.CALL:
                call = {"call_id": self.planned.plan.call_id(), "name": block.name, "arguments": ""}
                item = {"id": f"fc_{place}", "type": "function_call", **call}
        return {**item, "status": "in_progress"}

    def _ended(self, block: Block) -> dict[str, Any]:
        """Returns the fields of an item that its end sets."""
        self._characters[block.kind] += len(block.text)
        ended: dict[str, Any] = {"status": "incomplete" if self._cut else "completed"}
        if block.kind is BlockKind.CALL:
            return ended | {"arguments": block.text}
        if block.kind is BlockKind.TEXT:
            return ended | {"content": [self._part(block, block.text)]}
        if self.wanted.encoded:
            ended["encrypted_content"] = encoded(block.text)
        return ended | {("summary" if self.wanted.summary else "content"): [self._part(block, block.text)]}

    def _of_response(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        written = named_event(kind, ResponseEvent(type=kind, sequence_number=self._sequence, **fields))
        self._sequence += 1
        return written
