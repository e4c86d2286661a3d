"""Large texts are estimated before they are tokenized, and tokenized one at a time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from helpers.engine_fakes import ByteTokenizer

from sglang_jax.engine.prompt_reader import CUT_TOKENS, LARGE_TEXT, PromptReader
from sglang_jax.engine.types import SCRIPT
from sglang_jax.errors import ParameterError, PromptTooLongError

LIMIT = 3 * LARGE_TEXT
CONTEXT = 10**7
"""Limit in tokens, which are characters here."""


class NotingTokenizer(ByteTokenizer):
    """Records the lengths of texts, and how many it had at once."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "\ud800" in text:
            raise ParameterError(f"lone surrogate at position {text.index(chr(0xD800))}", param="text")
        with self._lock:
            self.lengths.append(len(text))
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        time.sleep(0.01)
        with self._lock:
            self._now -= 1
        return super().encode(text, add_special_tokens=add_special_tokens)


async def test_a_text_that_is_certainly_too_long_is_never_tokenized_as_a_whole() -> None:
    tokenizer = NotingTokenizer()
    reader = PromptReader(tokenizer)
    text = "a" * (20 * LARGE_TEXT)
    with pytest.raises(PromptTooLongError, match=f"messages has more than {LIMIT} tokens") as caught:
        await reader.encode(text, SCRIPT, CONTEXT, max_tokens=LIMIT, param="messages")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "messages")
    assert tokenizer.lengths == [LARGE_TEXT] * 4
    reader.close()


async def test_a_text_that_may_fit_is_tokenized_as_a_whole() -> None:
    """Its parts may have more tokens than the whole: the caller counts the tokens of the whole."""
    tokenizer = NotingTokenizer()
    reader = PromptReader(tokenizer)
    text = "a" * (LIMIT + 3 * CUT_TOKENS)
    assert len(await reader.encode(text, SCRIPT, CONTEXT, max_tokens=LIMIT, param="prompt")) == len(text)
    assert tokenizer.lengths == [LARGE_TEXT] * 3 + [3 * CUT_TOKENS, len(text)]
    with pytest.raises(PromptTooLongError):
        await reader.encode(text + "a", SCRIPT, CONTEXT, max_tokens=LIMIT, param="prompt")
    reader.close()


async def test_large_texts_wait_for_each_other_and_others_do_not() -> None:
    tokenizer = NotingTokenizer()
    reader = PromptReader(tokenizer)
    await asyncio.gather(
        *[reader.encode("a" * (LARGE_TEXT + 1), SCRIPT, CONTEXT, max_tokens=LIMIT, param="prompt") for _ in range(4)]
    )
    assert tokenizer.most_at_once == 1
    await asyncio.gather(
        *[reader.encode("a" * 2000, SCRIPT, CONTEXT, max_tokens=LIMIT, param="prompt") for _ in range(4)]
    )
    assert tokenizer.most_at_once == 2
    reader.close()


async def test_errors_in_a_text_refer_to_the_whole() -> None:
    reader = PromptReader(NotingTokenizer())
    text = "a" * (2 * LARGE_TEXT) + "\ud800"
    with pytest.raises(ParameterError, match=f"position {2 * LARGE_TEXT}"):
        await reader.encode(text, SCRIPT, CONTEXT, max_tokens=LIMIT, param="prompt")
    reader.close()
