"""How many drafts each row is given in a step: as many as are likely to pay for themselves."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.runner.plan import Int32

Float64 = NDArray[np.float64]

_MEMORY = 0.8
"""Weight of what a row's drafts did before, after one more step with drafts: about five are remembered."""

_OWN_PRIOR = 1.0
"""Drafts that what is known of all rows counts for, when a row is judged."""

_ALL_MEMORY = 0.99
_PROBE_EVERY = 64
"""Steps after which a row whose drafts did not pay is tried again."""

_TIME_MEMORY = 0.9
_WORTH = 1.02
"""How much more a second must give before drafts are made: estimates are not exact."""


class Drafting(Protocol):
    """Chooses numbers of drafts, and is told what became of them."""

    def choose(self, rows: Int32, most: Int32, room: int) -> Int32:
        """Queries of each of `rows` `[rows]` in the next step, at least 1 and at most `most` `[rows]`, and together at
        most `room`, or one each."""
        ...

    def observe(self, rows: Int32, widths: Int32, counts: Int32) -> None:
        """Of `rows`, which had `widths` queries, `counts` of the tokens that were sampled are the row's: all `[n]`."""
        ...

    def took(self, queries: int, seconds: float) -> None:
        """A step without prompts had so many queries and took so long."""
        ...

    def seated(self, rows: Int32) -> None:
        """Other requests have these rows from now on."""
        ...


class AllThatFit:
    """Each row as many drafts as there is room for."""

    def choose(self, rows: Int32, most: Int32, room: int) -> Int32:
        return np.minimum(most, max(room // len(rows), 1))

    def observe(self, rows: Int32, widths: Int32, counts: Int32) -> None: ...

    def took(self, queries: int, seconds: float) -> None: ...

    def seated(self, rows: Int32) -> None: ...


class WhatPays:
    """As many drafts as make the most tokens of a second, by what drafts of each row have come to lately and by how
    long steps of as many queries take.

    A draft counts only if all before it are right. If one of a row is right with probability a, the i-th is with
    a ** i; steps are filled up with the likeliest drafts of all rows, up to one of the sizes that steps are padded to.
    A size that was not tried yet is taken to cost what the largest smaller one does, or half of the smallest, so that
    it is tried. A row whose drafts did not pay is tried again every `_PROBE_EVERY` of its steps.
    """

    def __init__(self, max_rows: int, max_samples: int) -> None:
        self._right: Float64 = np.zeros(max_rows)
        self._tried: Float64 = np.zeros(max_rows)
        self._idle: Int32 = np.zeros(max_rows, np.int32)
        self._all_right, self._all_tried = 1.0, 2.0
        self._powers = np.arange(1, max_samples, dtype=np.float64)
        self._seconds: dict[int, float] = {}

    def choose(self, rows: Int32, most: Int32, room: int) -> Int32:
        """See `Drafting`."""
        count = len(rows)
        widths = np.ones(count, np.int32)
        if room <= count or not (most > 1).any():
            return widths
        values = self._values(rows, most)
        order = np.argsort(-values, axis=None, kind="stable")
        order = order[: min(room - count, int(np.count_nonzero(values)))]
        gains = np.cumsum(values.reshape(-1)[order])
        drafts, best = 0, _WORTH * count / self._expect(count)
        for size in _sizes(count, count + len(order)):
            rate = (count + gains[min(size - count, len(order)) - 1]) / self._expect(size)
            if rate > best:
                drafts, best = min(size - count, len(order)), rate
        if not drafts:
            drafts = int(np.count_nonzero(values.reshape(-1)[order] >= 1.0))
        np.add.at(widths, order[:drafts] // len(self._powers), 1)
        self._idle[rows] = np.where(widths > 1, 0, self._idle[rows] + 1)
        return widths

    def observe(self, rows: Int32, widths: Int32, counts: Int32) -> None:
        """See `Drafting`."""
        drafted = widths > 1
        if not drafted.any():
            return
        rows, right = rows[drafted], counts[drafted] - 1
        tried = np.minimum(right + 1, widths[drafted] - 1)  # the first that was wrong ends the trial
        self._right[rows] = _MEMORY * self._right[rows] + right
        self._tried[rows] = _MEMORY * self._tried[rows] + tried
        self._all_right = _ALL_MEMORY * self._all_right + float(right.mean())
        self._all_tried = _ALL_MEMORY * self._all_tried + float(tried.mean())

    def took(self, queries: int, seconds: float) -> None:
        """See `Drafting`."""
        size = _padded(queries)
        known = self._seconds.get(size)
        if known is not None:
            seconds = _TIME_MEMORY * known + (1.0 - _TIME_MEMORY) * min(seconds, 3.0 * known)
        self._seconds[size] = seconds

    def seated(self, rows: Int32) -> None:
        """See `Drafting`."""
        self._right[rows] = self._tried[rows] = 0.0
        self._idle[rows] = 0

    def _values(self, rows: Int32, most: Int32) -> Float64:
        """How likely each draft is to count, `[rows, max_samples - 1]`; 0 where there is no room for it."""
        prior = self._all_right / self._all_tried
        chance = (self._right[rows] + _OWN_PRIOR * prior) / (self._tried[rows] + _OWN_PRIOR)
        values: Float64 = np.minimum(chance, 0.99)[:, None] ** self._powers
        values[:, 0] = np.where(self._idle[rows] >= _PROBE_EVERY, 1.0, values[:, 0])
        return np.where(self._powers < most[:, None], values, 0.0)

    def _expect(self, queries: int) -> float:
        """Seconds of a step."""
        size = _padded(queries)
        if size in self._seconds:
            return self._seconds[size]
        smaller = [other for other in self._seconds if other < size]
        if smaller:
            return self._seconds[max(smaller)]
        return 0.5 * self._seconds[min(self._seconds)] if self._seconds else 1.0


def _padded(queries: int) -> int:
    """The power of two that a step is padded to."""
    return 1 << max(queries - 1, 1).bit_length()


def _sizes(count: int, most: int) -> list[int]:
    """Numbers of queries above `count` up to `most` that waste no padding, and `most`."""
    sizes = [1 << power for power in range(count.bit_length(), most.bit_length())]
    return [size for size in sizes if count < size < most] + ([most] if most > count else [])
