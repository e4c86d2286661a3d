"""How many tokens of prompts a step computes, and whose."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from typing import Protocol

import numpy as np

from sglang_jax.runner.plan import LAST_TOKEN, Int32, StepPlan
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.step_time import Padding, StepShape, StepTimes

OLDEST_SHARE = 4
"""The prompt that has had its row longest gets at least one token in so many of those that a step has for prompts."""

PRIORITY_TURN = 4
"""In one of so many steps, prompts are taken by their work alone, whatever their priority."""

LEAST_CHUNK = 16
"""Tokens of prompts that a step computes whatever its time: prompts have to end."""

MOST_MARGIN = 0.25
"""On a machine whose steps take now less and now more time, chunks are planned for a time that is shorter by up to this
share: they would shrink to nothing if all of the noise were allowed for."""

WorkKey = tuple[int, int, tuple[int, int]]


def goes_by_priority(step: int) -> bool:
    """Whether prompts of a higher priority go first in this step."""
    return step % PRIORITY_TURN != PRIORITY_TURN - 1


class PrefillWork:
    """Tokens that prompts under way have still to compute."""

    def __init__(self, prompts: list[Request], *, by_priority: bool = True) -> None:
        self.total = 0
        self._by_priority = by_priority
        self._order: list[WorkKey] = []
        for request in prompts:
            self.add(request, request.prefill_len - request.record.kv_allocated_len)

    def add(self, request: Request, work: int) -> None:
        """One more prompt."""
        self.total += work
        insort(self._order, _key(request, work, self._by_priority))

    def ahead_of(self, request: Request, work: int) -> int:
        """Tokens of prompts whose chunks would go before those of a request with so much work."""
        place = bisect_left(self._order, _key(request, work, self._by_priority))
        return sum(entry[1] for entry in self._order[:place])


class ChunkSharing:
    """Shares the tokens that a step has for prompts.

    Highest priority first, then least work left, then the row that was given first: a short prompt never waits behind
    a long one. Of each `OLDEST_SHARE` tokens one goes to the prompt that has had its row longest all the same, so that
    it ends, whatever arrives. In one of `PRIORITY_TURN` steps priorities do not count, so that clients who may choose
    theirs delay others no longer than so many times as long.
    """

    def __init__(self) -> None:
        self._credit = 0.0

    def share(
        self,
        prompts: list[Request],
        work: list[int],
        allowance: int,
        most: list[int] | None = None,
        *,
        by_priority: bool = True,
    ) -> list[int]:
        """How many tokens each of `prompts` computes, of `work` tokens that it has left; at most `most` if given."""
        most = work if most is None else most
        if sum(most) <= allowance:
            self._credit = 0.0
            return most
        order = _order(prompts, work, by_priority)
        oldest = _oldest(prompts)
        self._credit = min(self._credit + allowance / OLDEST_SHARE, float(allowance))
        parts = _fill(order, most, allowance, oldest, int(self._credit))
        self._credit = max(self._credit - parts[oldest], 0.0)
        return parts


class ChunkBudget(Protocol):
    """Decides how many tokens of prompts the next step has."""

    @property
    def size(self) -> int:
        """The most that any step has."""
        ...

    def allowance(
        self,
        decode_tokens: int,
        decode_lens: Int32,
        prompts: list[Request],
        work: list[int],
        most: int,
        *,
        by_priority: bool = True,
    ) -> int:
        """At most `most`, beside decode rows whose KV is `decode_lens` `[rows]` tokens long, and that compute
        `decode_tokens` in all; `prompts` have `work` tokens left; `by_priority`: as `goes_by_priority` says."""
        ...

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long."""
        ...

    def report(self) -> dict[str, float]:
        """Figures for `/server_info`."""
        ...


class FixedChunk:
    """The same number for each step."""

    def __init__(self, size: int) -> None:
        self.size = size

    def allowance(
        self,
        decode_tokens: int,
        decode_lens: Int32,
        prompts: list[Request],
        work: list[int],
        most: int,
        *,
        by_priority: bool = True,
    ) -> int:
        return min(self.size, most)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Nothing is learnt."""

    def report(self) -> dict[str, float]:
        return {}


class TimedChunk:
    """As many as leave a step within a time, by what earlier steps took.

    - What was never run is not foretold: a step has at most twice as many tokens of prompts as any before it.
    - Where the time is too short for a step without prompts, prompts may take half as long as that: nobody gains by
      prompts that do not end.
    - A step that is padded anyway is filled.

    **Arguments:** `target`: seconds of a step; `size`: most tokens; `padding`: of the runner's programs.
    """

    def __init__(self, target: float, size: int, padding: Padding) -> None:
        self._target = target
        self.size = size
        self._padding = padding
        self.times = StepTimes()

    def allowance(
        self,
        decode_tokens: int,
        decode_lens: Int32,
        prompts: list[Request],
        work: list[int],
        most: int,
        *,
        by_priority: bool = True,
    ) -> int:
        most = min(self.size, most)
        if most <= LEAST_CHUNK:
            return most
        rows, context = decode_tokens, int(decode_lens.sum())
        order, oldest = _order(prompts, work, by_priority), _oldest(prompts)
        starts = [request.prefill_len - left for request, left in zip(prompts, work, strict=True)]
        alone = self.times.expect(self._shape(rows, context, []))
        room = max(self._target / (1.0 + min(2.0 * self.times.error, MOST_MARGIN)), 1.5 * alone)

        def fits(tokens: int) -> bool:
            parts = _fill(order, work, tokens, oldest, tokens // OLDEST_SHARE)
            chunks = [(start, part) for start, part in zip(starts, parts, strict=True) if part]
            # Prompts that are not admitted yet may take what these leave.
            chunks += [(0, tokens - sum(parts))] if tokens > sum(parts) else []
            return self.times.expect(self._shape(rows, context, chunks)) <= room

        low, high = LEAST_CHUNK, min(most, max(2 * self.times.longest_chunks, 2 * LEAST_CHUNK))
        if fits(high):
            low = high
        while high - low > max(low // 16, 1):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return min(most, max(low, self._padding.tokens(rows + low, rows + 1) - rows))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        lengths, kv_lens = plan.query_lens, plan.kv_lens
        decoding = plan.tokens[np.cumsum(lengths) - lengths] == LAST_TOKEN
        prompts = ~decoding
        starts = (kv_lens - lengths)[prompts]
        chunks = list(zip(starts.tolist(), lengths[prompts].tolist(), strict=True))
        tokens, context = int(lengths[decoding].sum()), int(kv_lens[decoding].sum())
        self.times.observe(self._shape(tokens, context, chunks), seconds)

    def report(self) -> dict[str, float]:
        """Steps that were learnt from, and the mean share by which recent ones took longer or shorter than expected."""
        return {"step_times_observed": self.times.observations, "step_time_error": round(self.times.error, 4)}

    def _shape(self, decode_rows: int, context: int, chunks: list[tuple[int, int]]) -> StepShape:
        """`decode_rows`: a token of a draft costs what a row does. `chunks`: (start, length) of each."""
        tokens = sum(length for _, length in chunks)
        if tokens:
            tokens = self._padding.tokens(decode_rows + tokens, decode_rows + len(chunks)) - decode_rows
        reads = sum(length * (2 * start + length) // 2 for start, length in chunks)
        return StepShape(decode_rows, context, tokens, reads)


def _key(request: Request, work: int, by_priority: bool) -> WorkKey:
    return (-request.priority if by_priority else 0, work, _seat(request))


def _seat(request: Request) -> tuple[int, int]:
    """Orders prompts by when they were given rows, which is by turns between keys; those without a row come last.
    In the order of arrival, all that one key has sent would go before a later prompt of another key."""
    return (sys.maxsize if request.kv is None else request.kv.serial, request.sequence)


def _order(prompts: list[Request], work: list[int], by_priority: bool) -> list[int]:
    """Indices of `prompts` in the order in which they are given tokens."""
    return sorted(range(len(prompts)), key=lambda index: _key(prompts[index], work[index], by_priority))


def _oldest(prompts: list[Request]) -> int:
    """Index of the prompt that has had its row longest, -1 if there is none."""
    return min(range(len(prompts)), key=lambda index: _seat(prompts[index]), default=-1)


def _fill(order: list[int], work: list[int], allowance: int, oldest: int, reserved: int) -> list[int]:
    """Tokens for each prompt: `reserved` for the oldest, the rest in order."""
    parts = [0] * len(order)
    if oldest >= 0:
        parts[oldest] = min(work[oldest], reserved, allowance)
        allowance -= parts[oldest]
    for index in order:
        if not allowance:
            break
        more = min(work[index] - parts[index], allowance)
        parts[index] += more
        allowance -= more
    return parts
