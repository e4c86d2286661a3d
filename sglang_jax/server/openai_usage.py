"""Token counts of one OpenAI request."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from sglang_jax.engine.types import OutputDelta
from sglang_jax.server.callers import Caller
from sglang_jax.server.openai_schema import OpenAIBody


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose KV was found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's `usage`. `prompt_tokens_details` is null for callers with `hide_cached_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class UsageCount:
    """Sums the tokens of all completions. A prompt and its cached tokens count once, those of its first completion."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completions: dict[tuple[int, int], int] = {}

    def add(self, number: int, output: OutputDelta) -> None:
        if output.index == 0:
            self._prompts[number] = (output.prompt_tokens, output.cached_tokens)
        self._completions[number, output.index] = output.completion_tokens

    def so_far(self, body: OpenAIBody) -> Usage | UnsetType | None:
        """Returns the usage of an event with choices, by `stream_options`: null if only the last event has it."""
        if body.continuous_usage:
            return self.total()
        return None if body.include_usage else UNSET

    def total(self) -> Usage:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached_tokens = sum(cached for _, cached in self._prompts.values())
        completion_tokens = sum(self._completions.values())
        details = None if self._caller.hide_cached_tokens else PromptTokensDetails(cached_tokens)
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
