"""Estimates the duration of steps from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

FORGETTING = 0.98
"""Weight of a measurement after one more of its kind: about fifty steps are remembered."""

RIDGE = 1e-6
MIN_SECONDS = 1e-5
OUTLIER = 3.0
"""Maximum ratio of a measured to an expected duration, or the reverse: a larger one, as by a compilation, counts as
this."""

_SETTLED = 12
"""Measurements after which outliers can be recognised."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The figures that a step's duration depends on. `context`: KV tokens that decode rows read in total;
    `chunk_tokens`: prompt tokens, padding included; `reads`: pairs of a query and a key that it sees, in all chunks."""

    decode_rows: int
    context: int
    chunk_tokens: int
    reads: int

    def features(self) -> Float64:
        """The figures as `[FEATURES]`, scaled so that equal values cost about the same."""
        return np.array(
            (1.0, self.decode_rows / 64, self.context / 2**18, self.chunk_tokens / 1024, self.reads / 2**24), np.float64
        )


FEATURES = 5


class StepTimes:
    """The seconds of a step as a sum of a constant and of costs per decode row, per prompt token and per key read, none
    of them negative.

    The method is least squares of the relative error with exponential forgetting (Ljung 1999, 11.2), so a step that
    took a thousand times as long as expected, even the first one, counts for very little. A ridge term handles loads
    that do not change, which leave the costs undetermined. Steps with and without chunks are forgotten separately, so
    that the cost of a chunk stays known through an hour of decoding. `error`: mean relative error of recent estimates;
    `longest_chunks`: the most prompt tokens that a step had.
    """

    def __init__(self) -> None:
        self._squares: Float64 = np.zeros((2, FEATURES, FEATURES))
        self._products: Float64 = np.zeros((2, FEATURES))
        self._weights: Float64 = np.zeros(FEATURES)
        self.observations = 0
        self.longest_chunks = 0
        self.error = 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        expected = self.expect(shape)
        scale = seconds = max(seconds, MIN_SECONDS)
        if self.observations >= _SETTLED and expected > 0.0:
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
            off = abs(seconds - expected) / expected
            self.error += 0.05 * (min(off, 1.0) - self.error)
            scale = max(expected, seconds / OUTLIER)
        features = shape.features() / scale
        kind = int(shape.chunk_tokens > 0)
        self._squares[kind] = FORGETTING * self._squares[kind] + np.outer(features, features)
        self._products[kind] = FORGETTING * self._products[kind] + features * (seconds / scale)
        self._weights = _solve(self._squares.sum(0) + RIDGE * np.eye(FEATURES), self._products.sum(0))
        self.observations += 1
        self.longest_chunks = max(self.longest_chunks, shape.chunk_tokens)

    def expect(self, shape: StepShape) -> float:
        return float(shape.features() @ self._weights)


def _solve(squares: Float64, products: Float64) -> Float64:
    """Least squares without negative weights: leaves out the most negative one and solves again. Setting negative
    weights to zero afterwards would leave the others wrong."""
    kept = list(range(FEATURES))
    weights: Float64 = np.zeros(FEATURES)
    while kept:
        found = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
        if found.min() >= 0.0:
            weights[kept] = found
            break
        del kept[int(found.argmin())]
    return weights


class Padding:
    """The padded number of tokens of a step with chunks. `shapes`: (tokens, rows) of the runner's programs, smallest
    first; empty if it pads nothing."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = tuple(shapes)

    def tokens(self, tokens: int, rows: int) -> int:
        """Tokens that a step of `rows` sequences computes, padding included."""
        for most_tokens, most_rows in self._shapes:
            if tokens <= most_tokens and rows <= most_rows:
                return most_tokens
        return tokens
