"""A limit for the logprobs of answers that do not stream, which are held until the answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_jax.engine.types import OutputDelta
from sglang_jax.errors import ParameterError
from sglang_jax.server.errors import BusyError

OF_ALL = 2
"""Limit of all unwritten answers together, as a multiple of the limit of one answer."""

FEW = 2**16
"""An answer with at most this many logprobs is not refused because of long answers of others."""

OF_SHORT_ONES = 128 * FEW
"""Additional logprobs of short answers together: thousands of requests may be in flight."""


class HeldLogprobs:
    """Counts the logprobs that all answers of a server hold. All methods run on one event loop.

    **Arguments:** `most`: limit of one answer: those of prompts and outputs, with alternatives, for each of n
    completions. Each takes about a hundred bytes, and some thirty as JSON.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[OutputDelta], None]]:
        """Counts the logprobs of one answer. Yields a function to call with each output; it raises `ParameterError` or
        `BusyError` above a limit."""
        mine = 0

        def hold(output: OutputDelta) -> None:
            nonlocal mine
            more = _count(output)
            mine += more
            self.count += more
            if mine > self.most:
                raise ParameterError(
                    f"the request asks for more than {self.most} logprobs, the limit of one response "
                    "(--max-logprobs-per-response), counting alternatives of all prompts and outputs. Send fewer "
                    "prompts per request, or set stream",
                    param="top_logprobs_num",
                )
            limit = OF_ALL * self.most + (OF_SHORT_ONES if mine <= FEW else 0)
            if self.count > limit:
                raise BusyError(
                    f"responses in preparation hold {self.count} logprobs; the limit is {limit}. Try again later, or "
                    "set stream"
                )

        try:
            yield hold
        finally:
            self.count -= mine


def _count(output: OutputDelta) -> int:
    return sum(
        len(tokens) * (1 + len(tokens[-1].top)) for tokens in (output.logprobs, output.prompt_logprobs) if tokens
    )
