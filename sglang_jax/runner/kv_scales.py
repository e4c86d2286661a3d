"""Whose scales of keys and values are used: the checkpoint's, where it brings any and the cache is of 8 bits."""

from __future__ import annotations

import logging

from sglang_jax.checkpoint.kv_scales import ScalesOfLayers
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import KVCacheDtype

logger = logging.getLogger(__name__)


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
