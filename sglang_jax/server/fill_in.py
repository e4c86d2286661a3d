"""Filling in the middle: the model writes what belongs between the text before a gap and the text after it.

Each family of models marks the two texts with other tokens, in one order or the other. The tokenizer shows which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sglang_jax.engine.types import ModelInfo, TextTokenizer
from sglang_jax.errors import ParameterError, PromptTooLongError
from sglang_jax.sampling import MAX_STOP_TOKEN_IDS, SamplingParams
from sglang_jax.server.errors import UnsupportedParameterError

LETTER = "a"
"""A text that every tokenizer knows."""

SEPARATOR = "☺"
"""A character that merges with nothing after it, as the makers of Code Llama and Mistral use it."""


@dataclass(frozen=True, slots=True)
class Family:
    """The spelling of a family's tokens.

    - `before`, `after`: stand in front of the text before the gap, and of the text after it.
    - `middle`: follows both; empty if the middle starts without a token.
    - `after_first`: the text after the gap comes first.
    - `ends`: further tokens that end the middle. A tokenizer need not have them.
    """

    before: str
    after: str
    middle: str
    after_first: bool = False
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.before, self.after, self.middle) if self.middle else (self.before, self.after)


FAMILIES = (
    # Qwen2.5-Coder and later, CodeGemma, Granite 4
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>"),
    ),
    # StarCoder, StarCoder2, Stable Code, CodeQwen1.5, Granite Code
    Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
    ),
    # SantaCoder
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # Code Llama
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    # DeepSeek-Coder, DeepSeek-V2 and later
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # Codestral and other models with Mistral's tokens
    Family("[PREFIX]", "[SUFFIX]", "", after_first=True),
)

Encode = Callable[[str, str], Awaitable[list[int]]]
"""Returns the ids of a text, without special tokens around it. The second argument is the request's field."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledPrompt(Sequence[int]):
    """The token ids that the model reads. They are joined only where they are read, because all prompts of a request
    share the text after the gap. `parts`: each `[tokens]`; `before`: the place of the text before the gap."""

    parts: tuple[NDArray[np.int32], ...]
    before: slice

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        found: int | list[int] = np.concatenate(self.parts)[place].tolist()
        return found

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.concatenate(self.parts, dtype=dtype)


@dataclass(frozen=True, slots=True)
class GapTokens:
    """The tokens of one tokenizer.

    - `before`, `after`, `middle`, `ends`: ids of those of its family.
    - `opening`: the token that the tokenizer puts before texts, if any.
    - `separator`: the ids of `SEPARATOR` if the tokenizer starts each text with a space, which a text after the gap
      must not have; else empty.
    """

    before: int
    after: int
    middle: tuple[int, ...]
    after_first: bool
    ends: tuple[int, ...]
    opening: tuple[int, ...]
    separator: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Self:
        """Returns the tokens of a tokenizer. Raises `UnsupportedParameterError` naming those that it lacks."""
        family = _family(tokenizer)
        before, after, *middle = (token for mark in family.marks if (token := tokenizer.token_id(mark)) is not None)
        ends = (tokenizer.token_id(end) for end in family.ends)
        plain, whole = tokenizer.encode(LETTER, add_special_tokens=False), tokenizer.encode(LETTER)
        starts_with_space = tokenizer.token_bytes(plain[0]).startswith(b" ")
        return cls(
            before=before,
            after=after,
            middle=tuple(middle),
            after_first=family.after_first,
            ends=tuple(end for end in ends if end is not None),
            opening=tuple(whole[:1]) if whole[:1] != plain[:1] else (),
            separator=tuple(tokenizer.encode(SEPARATOR, add_special_tokens=False)) if starts_with_space else (),
        )

    async def prompts(self, texts: Sequence[str], suffix: str, encode: Encode, limit: int) -> list[FilledPrompt]:
        """Returns the prompt for each of the texts before a gap, all with the same text after it. `limit`: the maximum
        tokens of one. Raises `PromptTooLongError`."""
        after = _array([self.after, *await self._continued(suffix, encode)])
        filled = []
        for text in texts:
            prompt = self._prompt(_array(await encode(text, "prompt") if text else []), after)
            if len(prompt) > limit:
                raise PromptTooLongError(
                    f"prompt has {len(prompt)} tokens, with suffix and the tokens that mark both; the limit is "
                    f"{limit}, because they share the context with the output",
                    param="prompt",
                )
            filled.append(prompt)
            await asyncio.sleep(0)
        return filled

    def stopping(self, sampling: SamplingParams, info: ModelInfo) -> SamplingParams:
        """Returns the parameters with the tokens that end the middle. Raises `ParameterError` if the request has too
        many others."""
        if sampling.ignore_eos:
            return sampling
        own, ends = set(sampling.stop_token_ids), {*self.ends, *info.eos_token_ids}
        if len(own | ends) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS - len(ends)} ids with suffix, because "
                f"{len(ends)} others end the middle, got {len(own)}",
                param="stop_token_ids",
            )
        return replace(sampling, stop_token_ids=tuple(sorted(own | set(self.ends))))

    async def _continued(self, text: str, encode: Encode) -> list[int]:
        """Returns the ids of a text that follows another, so the tokenizer must not add a space."""
        if not self.separator:
            return await encode(text, "suffix")
        return (await encode(SEPARATOR + text, "suffix"))[len(self.separator) :]

    def _prompt(self, before: NDArray[np.int32], after: NDArray[np.int32]) -> FilledPrompt:
        """`after` starts with the token that marks it."""
        opening, mark, middle = _array(self.opening), _array([self.before]), _array(self.middle)
        start = len(opening) + len(mark) + (len(after) if self.after_first else 0)
        place = slice(start, start + len(before))
        if self.after_first:
            return FilledPrompt((opening, after, mark, before, middle), place)
        return FilledPrompt((opening, mark, before, after, middle), place)


def _array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def _family(tokenizer: TextTokenizer) -> Family:
    """Returns the first family whose tokens the tokenizer has. Raises `UnsupportedParameterError`."""
    missing = [[mark for mark in family.marks if tokenizer.token_id(mark) is None] for family in FAMILIES]
    for family, absent in zip(FAMILIES, missing, strict=True):
        if not absent:
            return family
    # Those of the family that lacks the fewest, if the tokenizer has any.
    partly = [absent for family, absent in zip(FAMILIES, missing, strict=True) if len(absent) < len(family.marks)]
    if partly:
        fewest = min(partly, key=len)
        lacking = f"no {' and no '.join(fewest)}"
    else:
        known = ", ".join(family.before for family in FAMILIES)
        lacking = f"no tokens to mark the text before and after a gap (none of {known})"
    raise UnsupportedParameterError(
        f"suffix is not supported by this model: its tokenizer has {lacking}; remove it", param="suffix"
    )
