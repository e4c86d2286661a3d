"""Prompts and steps of models that are compared, for processes that need not import torch."""

from __future__ import annotations

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
