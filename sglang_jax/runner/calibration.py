"""What a model computes to calibrate a cache of 8 bits on itself, the same for every backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS, LENGTH = 8, 64
"""Sequences of a calibration, and tokens of each. The first key and value of a sequence are often far larger than all
others (Xiao et al. 2023, "Efficient streaming language models with attention sinks"), so that one sequence would not
do."""

_SEED = 0


def calibration_tokens(vocab_size: int, most: int = LENGTH) -> NDArray[np.int32]:
    """int32 `[ROWS, length]`, drawn evenly from the whole vocabulary, always the same ones; `length` is `LENGTH` or, if
    that is less, `most`."""
    return np.random.default_rng(_SEED).integers(0, vocab_size, (ROWS, min(LENGTH, most)), dtype=np.int32)
