"""From what a client calls a prompt to checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine import validation
from sglang_jax.engine.types import TextTokenizer

LONG_TEXT = 1024
"""Prompts of more characters are tokenized in a thread, so that the event loop goes on meanwhile."""

TOKENIZER_THREADS = 2


class PromptReader:
    """Tokenizes texts, long ones in threads of its own."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def token_ids(self, prompt: str | Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
        """The ids `[tokens]` of a prompt. Raises `ParameterError` for ids that the model does not have."""
        if not isinstance(prompt, str):
            return validation.prompt_array(prompt, vocab_size)
        if len(prompt) <= LONG_TEXT:
            return validation.prompt_array(self._tokenizer.encode(prompt), vocab_size)
        ids = await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenizer.encode, prompt)
        return validation.prompt_array(ids, vocab_size)

    def close(self) -> None:
        """Ends the threads once they are done with what they have."""
        self._threads.shutdown(wait=False)
