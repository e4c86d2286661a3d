"""Who computes how much of a prompt in a step."""

from __future__ import annotations

from bisect import bisect_left, insort

from sglang_jax.scheduler.request import Request

OLDEST_SHARE = 4
"""The prompt that arrived first is given at least one token in so many of those that a step has for prompts."""

WorkKey = tuple[int, int, int]


class PrefillWork:
    """Tokens that prompts under way have still to compute."""

    def __init__(self, prompts: list[Request]) -> None:
        self.total = 0
        self._order: list[WorkKey] = []
        for request in prompts:
            self.add(request, request.prefill_len - request.record.kv_allocated_len)

    def add(self, request: Request, work: int) -> None:
        """One more prompt."""
        self.total += work
        insort(self._order, _key(request, work))

    def ahead_of(self, request: Request, work: int) -> int:
        """Tokens of prompts whose chunks would go before those of a request with so much work."""
        return sum(entry[1] for entry in self._order[: bisect_left(self._order, _key(request, work))])


class ChunkSharing:
    """Shares the tokens that a step has for prompts.

    Highest priority first, then least work left, then oldest: a short prompt never waits behind a long one. Of each
    `OLDEST_SHARE` tokens one is the oldest prompt's all the same, so that it ends, whatever arrives.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    def share(self, prompts: list[Request], work: list[int], allowance: int) -> list[int]:
        """How many tokens each of `prompts` computes, of `work` tokens that it has left."""
        if sum(work) <= allowance:
            self._credit = 0.0
            return work
        order = sorted(range(len(prompts)), key=lambda index: _key(prompts[index], work[index]))
        oldest = min(order, key=lambda index: prompts[index].sequence)
        self._credit = min(self._credit + allowance / OLDEST_SHARE, float(allowance))
        parts = [0] * len(prompts)
        parts[oldest] = min(work[oldest], int(self._credit))
        left = allowance - parts[oldest]
        for index in order:
            more = min(work[index] - parts[index], left)
            parts[index] += more
            left -= more
            if not left:
                break
        self._credit = max(self._credit - parts[oldest], 0.0)
        return parts


def _key(request: Request, work: int) -> WorkKey:
    return (-request.priority, work, request.sequence)
