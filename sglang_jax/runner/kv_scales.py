"""Whose scales of keys and values are used: the checkpoint's, where it brings any and the cache is of 8 bits; and what
a model computes to calibrate such a cache on itself, the same for every backend."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.kv_scales import ScalesOfLayers
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import KVCacheDtype

logger = logging.getLogger(__name__)

ROWS, LENGTH = 8, 64
"""Sequences of a calibration, and tokens of each. The first key and value of a sequence are often far larger than all
others (Xiao et al. 2023, "Efficient streaming language models with attention sinks"), so that one sequence would not
do."""

_SEED = 0


def scales_of_checkpoint(checkpoint: Checkpoint, dtype: KVCacheDtype) -> ScalesOfLayers | None:
    """By what keys and values are stored divided in a cache of `dtype`.

    None where the cache is not of 8 bits, or where the checkpoint brings no scales: float8, whose steps are as small as
    its numbers, is then stored at a scale of 1. The log says which it is.

    **Raises:** `CheckpointError` for scales that cannot be used.
    """
    if dtype is KVCacheDtype.AUTO:
        if checkpoint.has_kv_scales:
            logger.info("The checkpoint's KV scales are not used: the KV cache is not 8-bit")
        return None
    found = checkpoint.kv_scales()
    if found is None:
        if dtype is KVCacheDtype.FLOAT8_E4M3:
            logger.info("Keys and values are stored in %s with a scale of 1: the checkpoint has no scales", dtype)
        return None
    if found.made_for in (None, dtype):
        logger.info("Keys and values are stored in %s with the checkpoint's scales", dtype)
    else:
        logger.info(
            "Keys and values are stored in %s: the checkpoint's scales, for %s, are converted to cover the same range",
            dtype,
            found.made_for,
        )
    return found.of(dtype)


def calibration_tokens(vocab_size: int, most: int = LENGTH) -> NDArray[np.int32]:
    """int32 `[ROWS, length]`, drawn evenly from the whole vocabulary, always the same ones; `length` is `LENGTH` or, if
    that is less, `most`."""
    return np.random.default_rng(_SEED).integers(0, vocab_size, (ROWS, min(LENGTH, most)), dtype=np.int32)
