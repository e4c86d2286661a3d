"""How many drafts each row is given in a step: as many as are likely to pay for themselves."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.lengths import Index
from sglang_jax.runner.plan import Int32

Float64 = NDArray[np.float64]

_MEMORY = 0.8
"""Weight of what a row's drafts did before, after one more step with drafts: about five are remembered."""

_OWN_PRIOR = 0.5
"""Drafts that what is known of all rows counts for, when a row is judged."""

_ALL_MEMORY = 0.99
_PROBE_EVERY = 16
"""Steps after which a row whose drafts did not pay is tried again, with one."""

_PROBE_SHARE = 0.01
"""Most of the time that may go to that."""

_SLOWER, _FASTER = 0.1, 0.5
"""Weights of a step that took longer than those of its size before, and of one that took less: what else a machine does
makes steps longer, and never shorter."""

_LEAST_SECONDS = 1e-6
_HOPE = 0.998
"""What the time of a larger step is multiplied by for each smaller one: what seemed to take long is tried again."""

_WORTH = 1.05
"""How much more a second must give before drafts are made: estimates are not exact."""


class Drafting(Protocol):
    """Chooses numbers of drafts, and is told what became of them."""

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        """Queries of each of `rows` `[rows]` in the next step, at least 1 and at most `most` `[rows]`, and together at
        most `room`, or one each."""
        ...

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None:
        """Of `rows`, which had `widths` queries, `counts` of the tokens that were sampled are the row's: all `[n]`."""
        ...

    def took(self, queries: int, seconds: float, most_drafts: int = 0) -> None:
        """A step without prompts had so many queries, at most so many drafts of a row, and took so long."""
        ...

    def seated(self, rows: Index) -> None:
        """Other requests have these rows from now on."""
        ...


class AllThatFit:
    """Each row as many drafts as there is room for."""

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        return np.minimum(most, max(room // len(rows), 1))

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None: ...

    def took(self, queries: int, seconds: float, most_drafts: int = 0) -> None: ...

    def seated(self, rows: Index) -> None: ...


class WhatPays:
    """As many drafts as make the most tokens of a second, by what drafts of each row have come to lately and by how
    long steps of as many queries take.

    A draft counts only if all before it are right. If one of a row is right with probability a, the i-th is with
    a ** i; steps are filled up with the likeliest drafts of all rows, up to one of the sizes that steps are padded to.
    A size that was not tried yet is taken to cost what the largest smaller one does, or half of the smallest, so that
    it is tried; and none to cost more than a larger one, as times are noisy. A row whose drafts did not pay is tried
    again every `_PROBE_EVERY` of its steps, as long as this takes next to no time.

    `one_by_one`: drafts of a row are made one after the other, by a second model. A step then takes as long as one
    without drafts, and so much for each that the row with the most has.
    """

    def __init__(self, max_rows: int, max_samples: int, *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self._guess_seconds, self._guess_hope = 0.0, 1.0
        self._right: Float64 = np.zeros(max_rows)
        self._tried: Float64 = np.zeros(max_rows)
        self._idle: Int32 = np.zeros(max_rows, np.int32)
        self._all_right, self._all_tried = 1.0, 2.0
        self._powers = np.arange(1, max_samples, dtype=np.float64)
        self._seconds: dict[int, float] = {}
        self._hopes: dict[int, float] = {}
        self._to_spend = 0.0

    def choose(self, rows: Index, most: Int32, room: int) -> Int32:
        """See `Drafting`."""
        count = len(rows)
        widths = np.ones(count, np.int32)
        if room <= count or not (most > 1).any():
            return widths
        if self._one_by_one and _padded(count) not in self._seconds:
            return widths  # what guesses take is what they take more than that
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
        """Places in `rows` of those that are given a draft though it is not likely to pay."""
        seconds = self._expect(len(rows))
        self._to_spend += _PROBE_SHARE * seconds
        idle = np.flatnonzero((self._idle[rows] >= _PROBE_EVERY) & (most > 1))[: room - len(rows)]
        cost = self._seconds.get(_padded(len(rows) + len(idle)), seconds) - seconds + self._guess_seconds
        if cost > self._to_spend:
            return idle[:0]
        self._to_spend -= cost
        return idle

    def observe(self, rows: Index, widths: Int32, counts: Int32) -> None:
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

    def took(self, queries: int, seconds: float, most_drafts: int = 0) -> None:
        """See `Drafting`."""
        if self._one_by_one and most_drafts:
            own = max(seconds - self._expect(queries), 0.0) / most_drafts
            self._guess_seconds, self._guess_hope = _learn(self._guess_seconds, own), 1.0
            return
        self._guess_hope = max(_HOPE * self._guess_hope, 1e-3)
        size = _padded(queries)
        self._seconds[size], self._hopes[size] = _learn(self._seconds.get(size), max(seconds, _LEAST_SECONDS)), 1.0
        for other in self._seconds:
            if other > size:
                self._hopes[other] = max(_HOPE * self._hopes[other], 1e-3)

    def seated(self, rows: Index) -> None:
        """See `Drafting`."""
        self._right[rows] = self._tried[rows] = 0.0
        self._idle[rows] = 0

    def _values(self, rows: Index, most: Int32) -> Float64:
        """How likely each draft is to count, `[rows, max_samples - 1]`; 0 where there is no room for it."""
        prior = self._all_right / self._all_tried
        chance = (self._right[rows] + _OWN_PRIOR * prior) / (self._tried[rows] + _OWN_PRIOR)
        values: Float64 = np.minimum(chance, 0.99)[:, None] ** self._powers
        return np.where(self._powers < most[:, None], values, 0.0)

    def _expect(self, queries: int, most_drafts: int = 0) -> float:
        """Seconds of a step."""
        size = _padded(queries)
        if not self._seconds:
            return 1.0
        hoped = {other: took * self._hopes[other] for other, took in self._seconds.items()}
        larger = min((took for other, took in hoped.items() if other > size), default=math.inf)
        smaller = max((other for other in hoped if other <= size), default=0)
        own = min(hoped[smaller], larger) if smaller else 0.5 * larger
        return own + most_drafts * self._guess_hope * self._guess_seconds


def _learn(known: float | None, seconds: float) -> float:
    """What something takes, once it took so many seconds."""
    if not known or seconds <= known / 3.0:  # what is known is of another time
        return seconds
    return known + (_SLOWER if seconds > known else _FASTER) * (min(seconds, 3.0 * known) - known)


def _padded(queries: int) -> int:
    """The power of two that a step is padded to."""
    return 1 << max(queries - 1, 1).bit_length()


def _sizes(count: int, most: int) -> list[int]:
    """Numbers of queries above `count` up to `most` that waste no padding, and `most`."""
    sizes = [1 << power for power in range(count.bit_length(), most.bit_length())]
    return [size for size in sizes if count < size < most] + ([most] if most > count else [])
