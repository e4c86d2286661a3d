"""Scales of keys and values in 8 bits: whether to use the checkpoint's, and tokens to calibrate a cache without any."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import KVCacheDtype

logger = logging.getLogger(__name__)

ROWS, LENGTH = 8, 64
"""Sequences of a calibration, and tokens of each. More than one, since the first key and value of a sequence are often
far larger than all others (Xiao et al. 2023, "Efficient streaming language models with attention sinks")."""

LARGEST_STORED = {KVCacheDtype.FLOAT8_E4M3: 448.0, KVCacheDtype.INT8: 127.0}
"""The largest number of each 8-bit dtype; larger values, divided by the scale, saturate."""

_SEED = 0


def kv_scale_factor(checkpoint: Checkpoint, dtype: KVCacheDtype) -> float | None:
    """The factor for the checkpoint's scales in a cache of `dtype`, so that scales made for another dtype cover the
    same range. None if the cache does not have 8 bits, or the checkpoint has no scales: float8, whose resolution is
    relative, is then stored with a scale of 1. Logs which case it is. Raises `CheckpointError` for scales that cannot
    be used."""
    parameters = checkpoint.kv_parameters()
    if not parameters.has(ParameterKind.SCALE):
        if dtype is KVCacheDtype.FLOAT8_E4M3:
            logger.info("Keys and values are stored in %s with a scale of 1: the checkpoint has no scales", dtype)
        return None
    if dtype is KVCacheDtype.AUTO:
        logger.info("The checkpoint's KV scales are not used: the KV cache is not 8-bit")
        return None
    made_for = checkpoint.kv_scales_made_for()
    parameters.check(ParameterKind.SCALE)
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
    """Token ids int32 `[ROWS, length]`, uniform over the vocabulary and always the same; `length` is at most `LENGTH`
    and `most`."""
    return np.random.default_rng(_SEED).integers(0, vocab_size, (ROWS, min(LENGTH, most)), dtype=np.int32)
