"""Counts the tokens of one request, for the usage that its answer reports."""

from __future__ import annotations

from sglang_jax.engine.types import OutputDelta
from sglang_jax.server.callers import Caller


class TokenCount:
    """Sums the tokens of all completions. A prompt and its cached tokens count once, those of its first completion.
    `shows_cached`: whether the caller may know how much of a prompt was cached."""

    def __init__(self, caller: Caller) -> None:
        self.shows_cached = not caller.hide_cached_tokens
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completions: dict[tuple[int, int], int] = {}

    def add(self, number: int, output: OutputDelta) -> None:
        """Counts the newest delta of a completion of prompt `number`."""
        if output.index == 0:
            self._prompts[number] = (output.prompt_tokens, output.cached_tokens)
        self._completions[number, output.index] = output.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the prefix cache; 0 if the caller may not know."""
        return sum(cached for _, cached in self._prompts.values()) if self.shows_cached else 0

    @property
    def completion_tokens(self) -> int:
        return sum(self._completions.values())
