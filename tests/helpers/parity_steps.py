"""Prompts and steps of models that are compared, and how, for processes that need not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

TOLERANCE = 2e-4

LENGTHS = (24, 43, 9, 30)
STEPS = (
    {0: 20, 1: 11},
    {0: 1, 1: 9, 2: 7},
    {0: 1, 2: 1, 1: 14, 3: 25},
    {1: 1, 2: 1, 3: 1, 0: 1},
    {3: 1, 0: 1},
    {3: 3, 1: 8},
)
"""Whole prompts, chunks, and decode rows, by themselves and with chunks; rows change their position from step
to step."""

TINY_VOCAB_SIZE = 384
"""That of tiny models."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, TINY_VOCAB_SIZE, length).astype(np.int32) for length in lengths]


class Paged(Protocol):
    """The paged model of either backend."""

    def run(
        self, sequences: Sequence[Any], steps: Sequence[dict[int, int]], cached: Sequence[int] | None = None
    ) -> list[np.ndarray]: ...

    def share(self, row: int, other: int) -> None: ...


def check_resumed(model: Paged, expected: Sequence[np.ndarray]) -> None:
    """Checks that logits of `prompts()` are those `expected`, and those of a request that resumes from the pages and
    the state of another, however these were computed."""
    sequences = prompts()
    for tokens, logits, wanted in zip(sequences, model.run(sequences, STEPS), expected, strict=True):
        assert len(logits) == len(tokens)
        assert np.abs(logits - wanted).max() < TOLERANCE
    longest = sequences[1]
    for chunks in ((33,), (1, 1, 31), (5, 11, 16, 1), (2, 1, 30)):
        start = sum(chunks)
        first = [sequences[0], longest, longest, longest]
        model.run(first, [{0: 1, 1: count} if done else {1: count} for done, count in enumerate(chunks)])
        model.share(1, 2)
        _, found = model.run(first, ({2: 3, 0: 2}, {2: 1}, {2: len(longest) - start - 4}), (0, 0, start, 0))
        assert np.abs(found - expected[1][start:]).max() < TOLERANCE
