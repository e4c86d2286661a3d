"""A limit for the logprobs of answers that do not stream, which are held until the answer is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_jax.engine.types import OutputDelta
from sglang_jax.errors import ParameterError
from sglang_jax.server.errors import BusyError

ALL_ANSWERS_FACTOR = 2
"""Limit of all unwritten answers together, as a multiple of the limit of one answer."""

SHORT_ANSWER = 2**16
"""An answer with at most this many logprobs is not refused because of long answers of others."""

EXTRA_FOR_SHORT_ANSWERS = 128 * SHORT_ANSWER
"""Additional logprobs of short answers together: thousands of requests may be in flight."""


class HeldLogprobs:
    """Counts the logprobs that all answers of a server hold, on one event loop. `most`: limit of one answer: prompts'
    and outputs', with alternatives, for each of n completions. Each takes 20 to 110 bytes, and some thirty as JSON."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[OutputDelta], None]]:
        """Yields a function to call with each output of one answer; raises `ParameterError`, `BusyError` above a
        limit."""
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
            limit = ALL_ANSWERS_FACTOR * self.most + (EXTRA_FOR_SHORT_ANSWERS if mine <= SHORT_ANSWER else 0)
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
