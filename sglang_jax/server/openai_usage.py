"""Token counts and the version of the weights, as OpenAI's routes report them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from sglang_jax.engine.types import OutputDelta
from sglang_jax.server.openai_schema import OpenAIBody
from sglang_jax.server.token_count import TokenCount


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens whose KV was found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's `usage`. `prompt_tokens_details` is null for callers with `hide_cached_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


def usage_of(tokens: TokenCount) -> Usage:
    prompt_tokens, completion_tokens = tokens.prompt_tokens, tokens.completion_tokens
    details = PromptTokensDetails(tokens.cached_tokens) if tokens.shows_cached else None
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def usage_so_far(tokens: TokenCount, body: OpenAIBody) -> Usage | UnsetType | None:
    """Returns the usage of an event with choices, by `stream_options`: null if only the last event has it."""
    if body.continuous_usage:
        return usage_of(tokens)
    return None if body.include_usage else UNSET


def weights_metadata(outputs: Iterable[OutputDelta]) -> dict[str, str]:
    """The `metadata` of an answer: the version of the weights of its first choice."""
    return {"weight_version": next(iter(outputs)).weight_version}
