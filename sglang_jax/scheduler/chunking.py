"""How many prompt tokens a step computes, and of which prompts."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from typing import Protocol

import numpy as np

from sglang_jax.runner.plan import LAST_TOKEN, Int32, StepPlan
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.step_time import Padding, StepShape, StepTimes

OLDEST_SHARE = 4
"""The prompt that has had its row longest gets at least one of this many prompt tokens."""

PRIORITY_TURN = 4
"""One of this many steps ignores priorities and orders prompts only by their work."""

MIN_CHUNK = 16
"""Minimum prompt tokens of a step, whatever their time, so that prompts make progress."""

MAX_MARGIN = 0.25
"""Maximum margin for noise in step times, as a fraction of the target: more would shrink chunks to nothing on a noisy
machine."""

WorkKey = tuple[tuple[bool, int], int, tuple[int, int]]


def goes_by_priority(step: int) -> bool:
    return step % PRIORITY_TURN != PRIORITY_TURN - 1


class PrefillWork:
    """The remaining tokens of running prompts."""

    def __init__(self, prompts: list[Request], *, by_priority: bool = True) -> None:
        self.total = 0
        self._by_priority = by_priority
        self._order: list[WorkKey] = []
        for request in prompts:
            self.add(request, request.prefill_len - request.record.kv_allocated_len)

    def add(self, request: Request, work: int) -> None:
        self.total += work
        insort(self._order, _key(request, work, self._by_priority))

    def ahead_of(self, request: Request, work: int) -> int:
        """Remaining tokens of prompts whose chunks would go before those of a request with `work` remaining tokens."""
        place = bisect_left(self._order, _key(request, work, self._by_priority))
        return sum(entry[1] for entry in self._order[:place])


class ChunkSharing:
    """Distributes a step's prompt tokens. The background is last. Before it, the highest priority is first, then the
    least remaining work, then the earliest row: a short prompt never waits behind a long one. One of `OLDEST_SHARE`
    tokens still goes to the prompt that has had its row longest, so that it ends, whatever arrives. One of
    `PRIORITY_TURN` steps ignores priorities, which bounds how much clients who choose their own priority can delay
    others."""

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
        """The tokens that each of `prompts` computes. `work`: its remaining tokens; `most`: its maximum, `work` if
        None."""
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


def whole_prompts(
    prompts: list[Request], work: list[int], allowance: int, most: int, *, by_priority: bool = True
) -> list[int]:
    """The tokens that each of `prompts` computes if none may be cut: its `work`, or none. The one that has had its row
    longest is first, even if it has more tokens than the `allowance`, up to `most`; the others are in the order of
    `ChunkSharing`, and one that does not fit keeps none that follow from their place."""
    parts = [0] * len(prompts)
    oldest = _oldest(prompts)
    left = max(allowance, min(work[oldest], most))
    for index in [oldest, *(each for each in _order(prompts, work, by_priority) if each != oldest)]:
        if work[index] <= left:
            parts[index] = work[index]
            left -= work[index]
    return parts


class ChunkBudget(Protocol):
    """Decides how many prompt tokens the next step may compute."""

    @property
    def size(self) -> int:
        """Maximum prompt tokens of any step."""
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
        """Prompt tokens of a step, at most `most`. `decode_tokens`: queries of its decode rows, whose KV has
        `decode_lens` `[rows]` tokens; `work`: remaining tokens of `prompts`; `by_priority`: see `goes_by_priority`."""
        ...

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns from the duration of a step."""
        ...

    def report(self) -> dict[str, float]:
        """Figures for `/server_info`."""
        ...


class FixedChunk:
    """The same number of prompt tokens in each step."""

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
        """Ignores the duration."""

    def report(self) -> dict[str, float]:
        return {}


class TimedChunk:
    """As many prompt tokens as keep a step within a target time, estimated from earlier steps. `target`: seconds;
    `size`: maximum prompt tokens; `padding`: of the runner's programs.

    - Estimates do not reach far beyond what was measured: a step has at most twice as many prompt tokens as any before.
    - If the target is too short even for a step without prompts, prompts may take half as long as such a step, so that
      they make progress.
    - If a step is padded anyway, prompt tokens fill the padding.
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
        if most <= MIN_CHUNK:
            return most
        rows, context = decode_tokens, int(decode_lens.sum())
        order, oldest = _order(prompts, work, by_priority), _oldest(prompts)
        starts = [request.prefill_len - left for request, left in zip(prompts, work, strict=True)]
        without_prompts = self.times.expect(self._shape(rows, context, []))
        room = max(self._target / (1.0 + min(2.0 * self.times.error, MAX_MARGIN)), 1.5 * without_prompts)

        def fits(tokens: int) -> bool:
            parts = _fill(order, work, tokens, oldest, tokens // OLDEST_SHARE)
            chunks = [(start, part) for start, part in zip(starts, parts, strict=True) if part]
            # Prompts that are not admitted yet may use the rest.
            chunks += [(0, tokens - sum(parts))] if tokens > sum(parts) else []
            return self.times.expect(self._shape(rows, context, chunks)) <= room

        low, high = MIN_CHUNK, min(most, max(2 * self.times.longest_chunks, 2 * MIN_CHUNK))
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
        return {"step_times_observed": self.times.observations, "step_time_error": round(self.times.error, 4)}

    def _shape(self, decode_rows: int, context: int, chunks: list[tuple[int, int]]) -> StepShape:
        """`decode_rows`: queries of decode rows, drafts included. `chunks`: (start, length) of each."""
        tokens = sum(length for _, length in chunks)
        if tokens:
            tokens = self._padding.tokens(decode_rows + tokens, decode_rows + len(chunks)) - decode_rows
        reads = sum(length * (2 * start + length) // 2 for start, length in chunks)
        return StepShape(decode_rows, context, tokens, reads)


def _key(request: Request, work: int, by_priority: bool) -> WorkKey:
    rank = (request.background, -request.priority if by_priority else 0)
    return (rank, work, _seniority(request))


def _seniority(request: Request) -> tuple[int, int]:
    """Orders prompts by when they got their rows, those without a row last. In the order of arrival, all prompts of one
    key would go before a later prompt of another key."""
    return (sys.maxsize if request.kv is None else request.kv.serial, request.sequence)


def _order(prompts: list[Request], work: list[int], by_priority: bool) -> list[int]:
    """Indices of `prompts` in the order in which they get tokens."""
    return sorted(range(len(prompts)), key=lambda index: _key(prompts[index], work[index], by_priority))


def _oldest(prompts: list[Request]) -> int:
    """Index of the prompt that has had its row longest, -1 if there are no prompts."""
    return min(range(len(prompts)), key=lambda index: _seniority(prompts[index]), default=-1)


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
