"""Sends a load to a running server, open-loop or closed-loop, on one event loop."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from sglang_jax.cli.bench.metrics import Chunk, RequestRecord
from sglang_jax.cli.bench.workloads import Conversation, Turn
from sglang_jax.cli.server_client import (
    ChatChunk,
    Completion,
    Generation,
    ProtocolError,
    check_answer,
    describe,
    failure,
    parse_answer,
)
from sglang_jax.config import Choice


class Api(Choice):
    """Routes that can be measured."""

    SGLANG = "sglang"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


@dataclass(slots=True)
class Reply:
    """One answer so far. `tokens`: their number, None if the server has not sent it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False


class Dialogue(ABC):
    """One conversation with a server, which keeps all turns and answers."""

    path: str

    @abstractmethod
    def request(self, turn: Turn) -> dict[str, Any]:
        """Returns the body that sends a turn with everything before it."""

    @abstractmethod
    def read(self, event: object, reply: Reply) -> bool:
        """Adds one event of the stream to `reply`. Returns whether it has new output. Raises `ProtocolError`."""

    @abstractmethod
    def remember(self, reply: Reply) -> None:
        """Appends the server's answer to the conversation."""


class GenerateDialogue(Dialogue):
    """`/generate`: token ids in both directions, so that all lengths are exact."""

    path = "/generate"

    def __init__(self) -> None:
        self._context: list[int] = []

    def request(self, turn: Turn) -> dict[str, Any]:
        self._context += turn.token_ids
        return {
            "input_ids": list(self._context),
            "sampling_params": {"max_new_tokens": turn.output_len, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
        }

    def read(self, event: object, reply: Reply) -> bool:
        generation = check_answer(Generation, event, self.path)
        figures = generation.meta_info
        tokens_before = reply.tokens or 0
        reply.text = generation.text
        reply.token_ids = generation.output_ids
        reply.tokens = figures.completion_tokens
        reply.prompt_tokens = figures.prompt_tokens
        reply.cached_tokens = figures.cached_tokens or 0
        reply.finished = figures.finish_reason is not None
        return reply.tokens > tokens_before

    def remember(self, reply: Reply) -> None:
        if len(reply.token_ids) != reply.tokens:
            raise ProtocolError(
                f"the next turn needs all {reply.tokens} output_ids of this turn, but the server sent "
                f"{len(reply.token_ids)}"
            )
        self._context += reply.token_ids


class OpenAIDialogue(Dialogue):
    """The common part of OpenAI's two routes. `ignore_eos` is an extension that most engines support."""

    def __init__(self, model: str) -> None:
        self._model = model

    def _options(self, turn: Turn) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_tokens": turn.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: object, reply: Reply) -> bool:
        checked = self._check(event)
        usage = checked.usage
        if usage is not None:
            details = usage.prompt_tokens_details
            reply.tokens = usage.completion_tokens
            reply.prompt_tokens = usage.prompt_tokens
            reply.cached_tokens = (details.cached_tokens if details else None) or 0
        new_text = "".join(choice.said for choice in checked.choices)
        reply.text += new_text
        reply.finished |= any(choice.finish_reason is not None for choice in checked.choices)
        return new_text != ""

    @abstractmethod
    def _check(self, event: object) -> Completion | ChatChunk: ...


class CompletionDialogue(OpenAIDialogue):
    """`/v1/completions`: sends a single prompt as token ids, but several turns as text, because answers have no ids."""

    path = "/v1/completions"

    def __init__(self, model: str, *, single_turn: bool) -> None:
        super().__init__(model)
        self._single_turn = single_turn
        self._context = ""

    def request(self, turn: Turn) -> dict[str, Any]:
        self._context += " " + turn.as_text()
        return {"prompt": list(turn.token_ids) if self._single_turn else self._context, **self._options(turn)}

    def _check(self, event: object) -> Completion:
        return check_answer(Completion, event, self.path)

    def remember(self, reply: Reply) -> None:
        self._context += reply.text


class ChatDialogue(OpenAIDialogue):
    """`/v1/chat/completions`: sends messages of words; the server counts their tokens."""

    path = "/v1/chat/completions"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._messages: list[dict[str, str]] = []

    def request(self, turn: Turn) -> dict[str, Any]:
        self._messages.append({"role": "user", "content": turn.as_text()})
        return {"messages": list(self._messages), **self._options(turn)}

    def _check(self, event: object) -> ChatChunk:
        return check_answer(ChatChunk, event, self.path)

    def remember(self, reply: Reply) -> None:
        self._messages.append({"role": "assistant", "content": reply.text})


def open_dialogue(api: Api, model: str, conversation: Conversation) -> Dialogue:
    match api:
        case Api.SGLANG:
            return GenerateDialogue()
        case Api.OPENAI:
            return CompletionDialogue(model, single_turn=len(conversation.turns) == 1)
        case Api.OPENAI_CHAT:
            return ChatDialogue(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under load."""

    base_url: str
    api: Api
    model: str
    extra_body: Mapping[str, Any]


async def run_load(
    client: httpx2.AsyncClient,
    target: Target,
    conversations: Sequence[Conversation],
    *,
    request_rate: float,
    max_concurrency: int | None,
    seed: int,
    on_done: Callable[[RequestRecord], None],
) -> tuple[list[RequestRecord], float]:
    """Sends all conversations. Returns a record of each request, and the total seconds. Conversations start as a
    Poisson process of `request_rate` per second (infinite: at once). At most `max_concurrency` requests run at once.
    Latencies do not include the wait for this limit. A conversation ends with its first failed request."""
    slots = asyncio.Semaphore(max_concurrency or len(conversations))
    records: list[RequestRecord] = []

    async def converse(conversation: Conversation) -> None:
        dialogue = open_dialogue(target.api, target.model, conversation)
        for turn in conversation.turns:
            record = RequestRecord(requested_tokens=turn.output_len)
            async with slots:
                await send(client, target, dialogue, turn, record)
            records.append(record)
            on_done(record)
            if not record.ok:
                return

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for conversation, arrival in zip(
            conversations, arrival_times(len(conversations), request_rate, seed), strict=True
        ):
            delay = start + arrival - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(converse(conversation))
    return records, time.perf_counter() - start


def arrival_times(count: int, request_rate: float, seed: int) -> list[float]:
    """Returns the times of the first `count` arrivals of a Poisson process of `request_rate` per second: seconds from
    the first, which is at 0."""
    if math.isinf(request_rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1.0 / request_rate, size=count)
    gaps[0] = 0.0
    return [float(arrival) for arrival in np.cumsum(gaps)]


async def send(
    client: httpx2.AsyncClient, target: Target, dialogue: Dialogue, turn: Turn, record: RequestRecord
) -> None:
    """Sends one turn and reads its answer. `record` gets each chunk as it arrives, or the error of a failed request."""
    body = {**dialogue.request(turn), **target.extra_body}
    record.start = time.perf_counter()
    reply = Reply()
    try:
        await _stream(client, dialogue, body, record, reply)
        if not reply.finished:
            raise ProtocolError("the stream ended without a finish reason")
        dialogue.remember(reply)
    except (httpx2.RequestError, ProtocolError) as error:
        record.error = describe(error)
    record.text = reply.text
    record.prompt_tokens = reply.prompt_tokens
    record.cached_tokens = reply.cached_tokens
    record.output_tokens = len(record.chunks) if reply.tokens is None else reply.tokens


async def _stream(
    client: httpx2.AsyncClient, dialogue: Dialogue, body: dict[str, Any], record: RequestRecord, reply: Reply
) -> None:
    """Reads server-sent events up to `[DONE]`, and records the time of each."""
    async with client.stream("POST", dialogue.path, json=body) as response:
        if not response.is_success:
            await response.aread()
            raise ProtocolError(f"status {failure(response)}")
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            now = time.perf_counter()
            event = parse_answer(data, dialogue.path)
            if isinstance(event, Mapping) and event.get("error") is not None:
                raise ProtocolError(f"error in the stream: {event['error']}")
            was_finished = reply.finished
            if dialogue.read(event, reply):
                record.chunks.append(Chunk(now, reply.tokens))
                record.end = now
            if reply.finished and not was_finished:
                record.end = now
