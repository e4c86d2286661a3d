"""How many drafts each row gets in a step: as many as are likely to pay for themselves."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.lengths import Index
from sglang_jax.runner.plan import Int32

Float64 = NDArray[np.float64]

_MEMORY = 0.8
"""Weight of a row's results after one more step with drafts: about five steps are remembered."""

_OWN_PRIOR = 0.5
"""Weight of all rows' results in the estimate for one row, in drafts."""

_ALL_MEMORY = 0.99
_PROBE_EVERY = 16
"""Steps after which a row whose drafts did not pay gets one draft again."""

_PROBE_SHARE = 0.01
"""Maximum fraction of the time that such trials may take."""

_SLOWER, _FASTER = 0.1, 0.5
"""Weights of a step slower, and of one faster, than earlier ones of its size: other load only makes steps longer."""

_MIN_SECONDS = 1e-6
_DISCOUNT = 0.998
"""Factor by which the estimate of a larger step shrinks with each smaller step, so that it is tried again."""

_WORTH = 1.05
"""Minimum gain in tokens per second for drafts, since estimates are inexact."""


class Drafting(Protocol):
    """Chooses the number of drafts per row, and learns from the results."""

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        """Queries `[rows]` of each row in the next step: 1 to `most` `[rows]`, together at most `room`, or one per
        row."""
        ...

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None:
        """Of the tokens that `rows` sampled for `widths` queries, `counts` were accepted: all `[n]`."""
        ...

    def observe_time(self, queries: int, seconds: float, most_drafts: int = 0) -> None:
        """A step without prompts had `queries`, at most `most_drafts` of a row, and took `seconds`."""
        ...

    def reset_rows(self, rows: Index) -> None:
        """Forgets these rows' results: they have other requests now."""
        ...


class FixedDrafts:
    """As many drafts per row as there is room for."""

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        return np.minimum(most, max(room // len(rows), 1))

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None: ...

    def observe_time(self, queries: int, seconds: float, most_drafts: int = 0) -> None: ...

    def reset_rows(self, rows: Index) -> None: ...


class AdaptiveDrafts:
    """As many drafts as maximise tokens per second, estimated from each row's recent acceptance and from the duration
    of steps by their number of queries.

    A draft is accepted only if all before it are: if one draft of a row is right with probability a, the i-th is
    accepted with a ** i. A step is filled with the most likely drafts of all rows, up to one of the sizes to which
    steps are padded. An unmeasured size is estimated to cost as much as the next smaller one, or half of the next
    larger one, so that it is tried; and no size more than a larger one, as durations are noisy. A row whose drafts did
    not pay gets one again after `_PROBE_EVERY` of its steps, if that takes little time.

    `one_by_one`: a second model makes a row's drafts one after the other. A step then takes as long as one without
    drafts, plus a time for each draft of the row with the most.
    """

    def __init__(self, max_rows: int, max_samples: int, *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self._draft_seconds, self._draft_discount = 0.0, 1.0
        self._right: Float64 = np.zeros(max_rows)
        self._tried: Float64 = np.zeros(max_rows)
        self._idle: Int32 = np.zeros(max_rows, np.int32)
        self._all_right, self._all_tried = 1.0, 2.0
        self._powers = np.arange(1, max_samples, dtype=np.float64)
        self._seconds: dict[int, float] = {}
        self._discounts: dict[int, float] = {}
        self._to_spend = 0.0

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        count = len(rows)
        widths = np.ones(count, np.int32)
        if room <= count or not (most > 1).any():
            return widths
        if self._one_by_one and _padded(count) not in self._seconds:
            return widths  # the time of drafts is measured as the time beyond that of such a step
        values = self._values(rows, most)
        order = np.argsort(-values, axis=None, kind="stable")
        order = order[: min(room - count, int(np.count_nonzero(values)))]
        gains = np.cumsum(values.reshape(-1)[order])
        depths = np.maximum.accumulate(order % len(self._powers)) + 1
        drafts, best = 0, _WORTH * count / self._expect(count)
        for size in _sizes(count, count + len(order)):
            last = min(size - count, len(order)) - 1
            rate = (count + gains[last]) / self._expect(size, int(depths[last]))
            if rate > best:
                drafts, best = last + 1, rate
        if drafts:
            np.add.at(widths, order[:drafts] // len(self._powers), 1)
        else:
            widths[self._to_probe(rows, most, room)] = 2
        self._idle[rows] = np.where(widths > 1, 0, self._idle[rows] + 1)
        return widths

    def _to_probe(self, rows: Index, most: Int32, room: int) -> NDArray[np.intp]:
        """Indices into `rows` of those that get a draft as a trial."""
        seconds = self._expect(len(rows))
        self._to_spend += _PROBE_SHARE * seconds
        idle = np.flatnonzero((self._idle[rows] >= _PROBE_EVERY) & (most > 1))[: room - len(rows)]
        cost = self._seconds.get(_padded(len(rows) + len(idle)), seconds) - seconds + self._draft_seconds
        if cost > self._to_spend:
            return idle[:0]
        self._to_spend -= cost
        return idle

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None:
        drafted = widths > 1
        if not drafted.any():
            return
        rows, right = rows[drafted], counts[drafted] - 1
        tried = np.minimum(right + 1, widths[drafted] - 1)  # drafts after the first rejected one were not tried
        self._right[rows] = _MEMORY * self._right[rows] + right
        self._tried[rows] = _MEMORY * self._tried[rows] + tried
        self._all_right = _ALL_MEMORY * self._all_right + float(right.mean())
        self._all_tried = _ALL_MEMORY * self._all_tried + float(tried.mean())

    def observe_time(self, queries: int, seconds: float, most_drafts: int = 0) -> None:
        if self._one_by_one and most_drafts:
            own = max(seconds - self._expect(queries), 0.0) / most_drafts
            self._draft_seconds, self._draft_discount = _learn(self._draft_seconds, own), 1.0
            return
        self._draft_discount = max(_DISCOUNT * self._draft_discount, 1e-3)
        size = _padded(queries)
        self._seconds[size], self._discounts[size] = _learn(self._seconds.get(size), max(seconds, _MIN_SECONDS)), 1.0
        for other in self._seconds:
            if other > size:
                self._discounts[other] = max(_DISCOUNT * self._discounts[other], 1e-3)

    def reset_rows(self, rows: Index) -> None:
        self._right[rows] = self._tried[rows] = 0.0
        self._idle[rows] = 0

    def _values(self, rows: Index, most: Int32) -> Float64:
        """The probability that each draft is accepted, `[rows, max_samples - 1]`; 0 for drafts beyond `most`."""
        prior = self._all_right / self._all_tried
        chance = (self._right[rows] + _OWN_PRIOR * prior) / (self._tried[rows] + _OWN_PRIOR)
        values: Float64 = np.minimum(chance, 0.99)[:, None] ** self._powers
        return np.where(self._powers < most[:, None], values, 0.0)

    def _expect(self, queries: int, most_drafts: int = 0) -> float:
        """Estimated seconds of a step."""
        size = _padded(queries)
        if not self._seconds:
            return 1.0
        discounted = {other: took * self._discounts[other] for other, took in self._seconds.items()}
        larger = min((took for other, took in discounted.items() if other > size), default=math.inf)
        smaller = max((other for other in discounted if other <= size), default=0)
        own = min(discounted[smaller], larger) if smaller else 0.5 * larger
        return own + most_drafts * self._draft_discount * self._draft_seconds


def _learn(known: float | None, seconds: float) -> float:
    if not known or seconds <= known / 3.0:  # the old estimate no longer holds
        return seconds
    return known + (_SLOWER if seconds > known else _FASTER) * (min(seconds, 3.0 * known) - known)


def _padded(queries: int) -> int:
    return 1 << max(queries - 1, 1).bit_length()


def _sizes(count: int, most: int) -> list[int]:
    """Numbers of queries above `count` up to `most` without padding, and `most`."""
    sizes = [1 << power for power in range(count.bit_length(), most.bit_length())]
    return [size for size in sizes if count < size < most] + ([most] if most > count else [])
