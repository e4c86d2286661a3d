"""How a conversation is said to each kind of server, and how its answer is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang_jax.cli.bench.workloads import Conversation, Turn, as_text


class Api(StrEnum):
    """The routes that can be measured."""

    SGLANG = "sglang"
    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"


class ProtocolError(Exception):
    """The server's answer is not of the form that its route has."""


@dataclass(slots=True)
class Reply:
    """One answer as far as it has come. `tokens` is None where the server does not say how many there are so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False


class Dialogue(ABC):
    """One conversation with a server: it remembers what both sides said."""

    path: str

    @abstractmethod
    def request(self, turn: Turn) -> dict[str, Any]:
        """The body that sends a turn with all before it."""

    @abstractmethod
    def read(self, event: Mapping[str, Any], reply: Reply) -> bool:
        """Takes one event of the stream into `reply`; True if it brought output."""

    @abstractmethod
    def remember(self, reply: Reply) -> None:
        """Puts the server's answer behind what was said."""


class GenerateDialogue(Dialogue):
    """`/generate`: token ids both ways, so that every length is exact."""

    path = "/generate"

    def __init__(self) -> None:
        self._said: list[int] = []

    def request(self, turn: Turn) -> dict[str, Any]:
        self._said += turn.token_ids
        return {
            "input_ids": list(self._said),
            "sampling_params": {"max_new_tokens": turn.output_len, "temperature": 0.0, "ignore_eos": True},
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], reply: Reply) -> bool:
        figures = event["meta_info"]
        tokens_before = reply.tokens or 0
        reply.text = event["text"]
        reply.token_ids = event.get("output_ids", [])
        reply.tokens = figures["completion_tokens"]
        reply.prompt_tokens = figures["prompt_tokens"]
        reply.cached_tokens = figures.get("cached_tokens") or 0
        reply.finished = figures["finish_reason"] is not None
        return reply.tokens is not None and reply.tokens > tokens_before

    def remember(self, reply: Reply) -> None:
        if len(reply.token_ids) != reply.tokens:
            raise ProtocolError(
                f"the next turn needs all {reply.tokens} output_ids of this one, the server sent {len(reply.token_ids)}"
            )
        self._said += reply.token_ids


class OpenAIDialogue(Dialogue):
    """What OpenAI's two routes have in common: `ignore_eos` is an extension that most engines take."""

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

    def read(self, event: Mapping[str, Any], reply: Reply) -> bool:
        usage = event.get("usage")
        if usage is not None:
            reply.tokens = usage["completion_tokens"]
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        new_text = "".join(self._text(choice) for choice in event["choices"])
        reply.text += new_text
        reply.finished |= any(choice.get("finish_reason") is not None for choice in event["choices"])
        return new_text != ""

    @abstractmethod
    def _text(self, choice: Mapping[str, Any]) -> str: ...


class CompletionDialogue(OpenAIDialogue):
    """`/v1/completions`: a lone prompt goes as token ids; with turns, which need the answer's ids, as text."""

    path = "/v1/completions"

    def __init__(self, model: str, *, lone: bool) -> None:
        super().__init__(model)
        self._lone = lone
        self._said = ""

    def request(self, turn: Turn) -> dict[str, Any]:
        self._said += " " + as_text(turn.token_ids)
        return {"prompt": list(turn.token_ids) if self._lone else self._said, **self._options(turn)}

    def _text(self, choice: Mapping[str, Any]) -> str:
        return choice["text"] or ""

    def remember(self, reply: Reply) -> None:
        self._said += reply.text


class ChatDialogue(OpenAIDialogue):
    """`/v1/chat/completions`: messages of words; the server says how many tokens they are."""

    path = "/v1/chat/completions"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._messages: list[dict[str, str]] = []

    def request(self, turn: Turn) -> dict[str, Any]:
        self._messages.append({"role": "user", "content": as_text(turn.token_ids)})
        return {"messages": list(self._messages), **self._options(turn)}

    def _text(self, choice: Mapping[str, Any]) -> str:
        return choice["delta"].get("content") or ""

    def remember(self, reply: Reply) -> None:
        self._messages.append({"role": "assistant", "content": reply.text})


def open_dialogue(api: Api, model: str, conversation: Conversation) -> Dialogue:
    """A dialogue in which nothing was said yet."""
    match api:
        case Api.SGLANG:
            return GenerateDialogue()
        case Api.OPENAI:
            return CompletionDialogue(model, lone=len(conversation.turns) == 1)
        case Api.OPENAI_CHAT:
            return ChatDialogue(model)
