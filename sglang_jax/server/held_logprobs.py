"""Logprobs of answers that do not stream: they are held until all of an answer is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_jax.engine.types import OutputDelta
from sglang_jax.errors import ParameterError
from sglang_jax.server.errors import BusyError

OF_ALL = 2
"""Times as many as one answer may have: of all answers together that are not written yet."""

FEW = 2**16
"""An answer with so many is never refused for the long ones of others."""

OF_SHORT_ONES = 128 * FEW
"""So many more all answers may have together where they have few each: thousands of requests may be in flight."""


class HeldLogprobs:
    """How many all answers of a server hold. All methods run on one event loop.

    **Arguments:** `most`: of one answer, of prompts and outputs, alternatives and repetitions for n completions
    included. Each takes about a hundred bytes, and then some thirty as JSON.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[OutputDelta], None]]:
        """One answer's. What it yields is to be called with each of its outputs, and raises `ParameterError` or
        `BusyError` for one that is too many."""
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
