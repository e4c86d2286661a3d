"""Scales of keys and values of an Orbax checkpoint: they lie in its marker, which is read without Orbax."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.kv_scales import KVScales
from sglang_jax.checkpoint.resolve import ORBAX_MARKER
from sglang_jax.errors import CheckpointError

KV_SCALES = "kv_scales"
"""The field of the marker."""


def read_orbax_kv_scales(folder: Path, config: ModelConfig) -> KVScales | None:
    """The scales that were converted with the weights; None if there were none.

    **Raises:** `CheckpointError` for a marker that cannot be read, or that holds other things.
    """
    path = folder / ORBAX_MARKER
    try:
        stored = json.loads(path.read_bytes()).get(KV_SCALES)
        return None if stored is None else KVScales.from_json(stored, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
