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
    """OpenAI's `usage`. `prompt_tokens_details` is null for callers that are not to know."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class UsageCount:
    """Adds up what the completions of all prompts used.

    A prompt counts once, however many completions it has, and so do its cached tokens: those of its first completion,
    as the others share what that one computed.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completions: dict[tuple[int, int], int] = {}

    def add(self, number: int, output: OutputDelta) -> None:
        """The newest delta of one completion of prompt `number`."""
        if output.index == 0:
            self._prompts[number] = (output.prompt_tokens, output.cached_tokens)
        self._completions[number, output.index] = output.completion_tokens

    def so_far(self, body: OpenAIBody) -> Usage | UnsetType | None:
        """The usage of an event that has choices: as `stream_options` ask, null where only the last event has it."""
        if body.continuous_usage:
            return self.total()
        return None if body.include_usage else UNSET

    def total(self) -> Usage:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        cached_tokens = sum(cached for _, cached in self._prompts.values())
        completion_tokens = sum(self._completions.values())
        details = None if self._caller.hide_cached_tokens else PromptTokensDetails(cached_tokens)
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
