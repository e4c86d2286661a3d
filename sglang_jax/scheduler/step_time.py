"""How long a step takes, learnt from the steps that were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

FORGETTING = 0.98
"""Weight of an observation after one more of its kind: about fifty steps are remembered."""

RIDGE = 1e-6
LEAST_SECONDS = 1e-5
OUTLIER = 3.0
"""A step that took so many times as long as expected, or as short, says little of the next: a program was compiled, a
core was taken away. It counts as that much and no more."""

_SETTLED = 12
"""Observations after which outliers can be told."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on.

    - `decode_rows`, and `context`: tokens of KV that they read together.
    - `chunk_tokens`: tokens of prompts, padding included, and `reads`: pairs of a query and a key that it sees, of all
      chunks together.
    """

    decode_rows: int
    context: int
    chunk_tokens: int
    reads: int

    def features(self) -> Float64:
        """`[FEATURES]`, of about the same size where each costs about as much."""
        return np.array(
            (1.0, self.decode_rows / 64, self.context / 2**18, self.chunk_tokens / 1024, self.reads / 2**24), np.float64
        )


FEATURES = 5


class StepTimes:
    """Seconds of a step as a sum: a constant, a part for each decode row, each token of a prompt, each key read; none
    of them negative.

    Least squares of the relative error with exponential forgetting (Ljung 1999, 11.2): a step that took a thousand
    times as long as it should, even the first one, counts for next to nothing. Ridged, as loads that do not change
    leave the parts undetermined. Steps with chunks and steps without are forgotten apart: an hour of decoding does not
    make the cost of a chunk unknown. `error` is the mean share by which recent steps took longer or shorter than
    expected; `longest_chunks`, the most tokens of prompts that a step had.
    """

    def __init__(self) -> None:
        self._squares: Float64 = np.zeros((2, FEATURES, FEATURES))
        self._products: Float64 = np.zeros((2, FEATURES))
        self._weights: Float64 = np.zeros(FEATURES)
        self.observations = 0
        self.longest_chunks = 0
        self.error = 0.0

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        expected = self.expect(shape)
        scale = seconds = max(seconds, LEAST_SECONDS)
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
        """Seconds that a step of this shape will take."""
        return float(shape.features() @ self._weights)


def _solve(squares: Float64, products: Float64) -> Float64:
    """Least squares without negative weights: whichever is most negative is left out, and the others are solved for
    again. Set to zero afterwards, the others would be wrong."""
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
    """Tokens that a step with chunks computes, for the tokens and sequences that it has.

    **Arguments:** `shapes`: (tokens, rows) of the runner's programs, smallest first; none if it pads nothing.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self._shapes = tuple(shapes)

    def tokens(self, tokens: int, rows: int) -> int:
        """At least `tokens`."""
        for most_tokens, most_rows in self._shapes:
            if tokens <= most_tokens and rows <= most_rows:
                return most_tokens
        return tokens
