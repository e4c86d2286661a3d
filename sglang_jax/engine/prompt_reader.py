"""From what a client calls a prompt to checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine import validation
from sglang_jax.engine.types import GenerateInput, ModelInfo, TextTokenizer

LONG_TEXT = 1024
"""Prompts of more characters are tokenized in a thread, so that the event loop goes on meanwhile."""

TOKENIZER_THREADS = 2


class PromptReader:
    """Tokenizes texts, long ones in threads of its own."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def token_ids(self, request: GenerateInput, info: ModelInfo) -> NDArray[np.int32]:
        """The ids `[tokens]` of a request's prompt. What is too long is refused before it costs anything.

        **Raises:** `PromptTooLongError`; `ParameterError` for ids that the model does not have, and as
        `validation.check_length` does.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            validation.check_characters(prompt, self._tokenizer, info.context_length)
        ids = await self._encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(ids, (Sequence, np.ndarray)) and len(ids) > 0:
            validation.check_length(request, len(ids), info.context_length)
        return validation.prompt_array(ids, info.vocab_size)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= LONG_TEXT:
            return self._tokenizer.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenizer.encode, text)

    def close(self) -> None:
        """Ends the threads once they are done with what they have."""
        self._threads.shutdown(wait=False)
