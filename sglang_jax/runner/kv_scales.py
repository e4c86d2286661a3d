"""Whose scales of keys and values are used: the checkpoint's, where it brings any and the cache is of 8 bits; and what
a model computes to calibrate such a cache on itself, the same for every backend."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.tensor_names import Kind
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import KVCacheDtype

logger = logging.getLogger(__name__)

ROWS, LENGTH = 8, 64
"""Sequences of a calibration, and tokens of each. The first key and value of a sequence are often far larger than all
others (Xiao et al. 2023, "Efficient streaming language models with attention sinks"), so that one sequence would not
do."""

LARGEST_STORED = {KVCacheDtype.FLOAT8_E4M3: 448.0, KVCacheDtype.INT8: 127.0}
"""The largest number of each type of 8 bits: what is beyond it times the scale saturates."""

_SEED = 0


def kv_scale_factor(checkpoint: Checkpoint, dtype: KVCacheDtype) -> float | None:
    """What the checkpoint's scales are to be multiplied by, for a cache of `dtype`: where they were made for another
    type, they then cover the same range.

    None where the cache is not of 8 bits, or where the checkpoint brings no scales: float8, whose steps are as small as
    its numbers, is then stored at a scale of 1. The log says which it is.

    **Raises:** `CheckpointError` for scales that cannot be used.
    """
    parameters = checkpoint.kv_parameters()
    if not parameters.has(Kind.SCALE):
        if dtype is KVCacheDtype.FLOAT8_E4M3:
            logger.info("Keys and values are stored in %s with a scale of 1: the checkpoint has no scales", dtype)
        return None
    if dtype is KVCacheDtype.AUTO:
        logger.info("The checkpoint's KV scales are not used: the KV cache is not 8-bit")
        return None
    made_for = checkpoint.kv_scales_made_for()
    parameters.check(Kind.SCALE)
    if made_for in (None, dtype):
        logger.info("Keys and values are stored in %s with the checkpoint's scales", dtype)
        return 1.0
    logger.info(
        "Keys and values are stored in %s: the checkpoint's scales, for %s, are converted to cover the same range",
        dtype,
        made_for,
    )
    return LARGEST_STORED[made_for] / LARGEST_STORED[dtype]


def calibration_tokens(vocab_size: int, most: int = LENGTH) -> NDArray[np.int32]:
    """int32 `[ROWS, length]`, drawn evenly from the whole vocabulary, always the same ones; `length` is `LENGTH` or, if
    that is less, `most`."""
    return np.random.default_rng(_SEED).integers(0, vocab_size, (ROWS, min(LENGTH, most)), dtype=np.int32)
