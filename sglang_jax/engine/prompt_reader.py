"""Converts a client's prompt to checked token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine import validation
from sglang_jax.engine.fair_threads import FairThreads
from sglang_jax.engine.types import GenerateInput, ModelInfo, Origin, TextTokenizer
from sglang_jax.errors import ParameterError, PromptTooLongError

LONG_TEXT = 1024
"""Longer texts (in characters) are tokenized in a thread, so that they do not block the event loop."""

SHORT_TEXT = 8192
"""Texts up to this length have separate threads, so that they do not wait for longer ones: they take a few milliseconds
each, and one of 32,000 characters takes ten."""

LARGE_TEXT = 65_536
"""Longer texts are tokenized one at a time, because each token takes some hundred bytes meanwhile. Their tokens are
counted first, in pieces of this many characters."""

CUT_TOKENS = 1024
"""Cutting a text may increase the number of its tokens, but always by fewer than this per cut."""

TOKENIZER_THREADS = 2
"""Threads for short texts, and the same number for those that are neither short nor large."""


class PromptReader:
    """Tokenizes texts, long ones in threads that tenants share fairly. A text whose request has left is skipped."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._for_short_texts = FairThreads(TOKENIZER_THREADS, "short-texts")
        self._threads = FairThreads(TOKENIZER_THREADS, "tokenizer")
        self._for_large_texts = FairThreads(1, "large-texts")

    @cached_property
    def opening(self) -> int:
        """The token that the tokenizer puts before texts; -1 if there is none. It may differ from the model's BOS:
        SmolLM2's starts each message of a chat, but no text."""
        plain, whole = self._tokenizer.encode("a", add_special_tokens=False), self._tokenizer.encode("a")
        return whole[0] if whole[:1] != plain[:1] else -1

    async def token_ids(
        self, request: GenerateInput, origin: Origin, request_id: str, info: ModelInfo
    ) -> NDArray[np.int32]:
        """Returns the ids `[tokens]` of a request's prompt; refuses a prompt that is too long before spending time on
        it. Raises `PromptTooLongError`; `ParameterError` for unknown ids, and as `validation.check_length` does."""
        prompt = request.prompt
        if isinstance(prompt, str):
            most = info.context_length
            ids: Any = await self.encode(prompt, origin, most, max_tokens=most, param="prompt", flow=request_id)
        else:
            ids = prompt
        if isinstance(ids, (Sequence, np.ndarray)) and len(ids) > 0:
            validation.check_length(request, len(ids), info.context_length)
        return validation.prompt_array(ids, info.vocab_size)

    async def encode(
        self,
        text: str,
        origin: Origin,
        context_length: int,
        *,
        add_special_tokens: bool = True,
        max_tokens: int,
        param: str,
        flow: str = "",
    ) -> list[int]:
        """Returns the ids of a text, without blocking other requests. `flow`: that of a text whose origin has none.
        Raises `PromptTooLongError` for a text that cannot fit the context, and for a large one that has clearly more
        than `max_tokens` (the caller checks the result for all others); `ParameterError` as the tokenizer does."""
        validation.check_characters(len(text), self._tokenizer, context_length, param)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) <= LONG_TEXT:
            return encode()
        threads = self._for_short_texts if len(text) <= SHORT_TEXT else self._threads
        if len(text) > LARGE_TEXT:
            threads, encode = self._for_large_texts, partial(self._encode_large, text, encode, max_tokens, param)
        return await threads.run(encode, size=len(text), tenant=origin.tenant, flow=origin.flow or flow)

    def _encode_large(self, text: str, encode: partial[list[int]], max_tokens: int, param: str) -> list[int]:
        counted = 0
        for start in range(0, len(text), LARGE_TEXT):
            try:
                counted += len(self._tokenizer.encode(text[start : start + LARGE_TEXT], add_special_tokens=False))
            except ParameterError:
                return encode()  # raises with the position in the whole text
            if counted - CUT_TOKENS * (start // LARGE_TEXT) > max_tokens:
                raise PromptTooLongError(
                    f"{param} has more than {max_tokens} tokens, the limit: the first "
                    f"{min(start + LARGE_TEXT, len(text))} of its {len(text)} characters have about {counted}",
                    param=param,
                )
        return encode()

    def close(self) -> None:
        self._for_short_texts.close()
        self._threads.close()
        self._for_large_texts.close()
