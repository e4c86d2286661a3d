"""Scales of keys and values that a checkpoint brings for a cache of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.kv_scale_names import KVScaleNames
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError

LARGEST_STORED = {KVCacheDtype.FLOAT8_E4M3: 448.0, KVCacheDtype.INT8: 127.0}
"""The largest number of each type of 8 bits: what is beyond it times the scale saturates."""


ScalesOfLayers = tuple[NDArray[np.float32], ...]
"""Of each layer float32 `[kv_heads, 2]`, for keys (0) and values (1); no heads for a layer without attention."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """What stored keys and values are to be multiplied by.

    - `numbers`: see `ScalesOfLayers`.
    - `made_for`: the type whose largest number they take the place of; None where the checkpoint does not say.
    """

    numbers: ScalesOfLayers
    made_for: KVCacheDtype | None

    def of(self, dtype: KVCacheDtype) -> ScalesOfLayers:
        """Scales for a cache of `dtype`: `numbers`, or, where these were made for another type, scales that cover the
        same range."""
        if self.made_for in (None, dtype):
            return self.numbers
        assert self.made_for is not None
        factor = np.float32(LARGEST_STORED[self.made_for] / LARGEST_STORED[dtype])
        return tuple(layer * factor for layer in self.numbers)

    def to_json(self) -> dict[str, Any]:
        """For files of JSON: every float32 is told exactly."""
        return {"made_for": self.made_for, "numbers": [layer.tolist() for layer in self.numbers]}

    @classmethod
    def from_json(cls, fields: dict[str, Any], config: ModelConfig) -> KVScales:
        """Raises `ValueError`, `KeyError` or `TypeError` for what `to_json` did not write for such a model."""
        made_for = None if fields["made_for"] is None else KVCacheDtype(fields["made_for"])
        numbers = tuple(np.array(layer, np.float32) for layer in fields["numbers"])
        shapes = [layer.shape for layer in numbers]
        usable = all(_usable(layer).all() for layer in numbers)
        if not usable or shapes != [(kv_heads, 2) for kv_heads in _kv_heads(config)]:
            raise ValueError(f"KV scales must be positive and fit the model's layers, got shapes {shapes}")
        return cls(numbers, made_for)


def read_kv_scales(
    reader: TensorReader, names: KVScaleNames, config: ModelConfig, made_for: KVCacheDtype | None
) -> KVScales:
    """The scales of a checkpoint whose tensors `check_tensors` found right; one number is that of every kv head.

    **Raises:** `CheckpointError` naming every tensor with a number that is not positive and finite.
    """
    numbers = tuple(np.empty((kv_heads, 2), np.float32) for kv_heads in _kv_heads(config))
    faults: dict[str, str] = {}
    for (layer, side), (name, *_) in names.of.items():
        found = np.asarray(reader.read(name), np.float32).reshape(-1)
        if not _usable(found).all():
            faults[name] = f"{name}: {', '.join(f'{number:g}' for number in found[~_usable(found)])}"
        numbers[layer][:, side] = found
    if faults:
        raise CheckpointError(
            "scales of keys and values must be positive and finite; these are not:\n  " + "\n  ".join(faults.values())
        )
    return KVScales(numbers, made_for)


def read_key_means(
    reader: TensorReader, names: KVScaleNames, config: ModelConfig
) -> tuple[NDArray[np.float32], ...] | None:
    """The mean of keys of each layer, float32 `[kv_heads, head_dim]`, no heads without attention; None where the
    checkpoint brings none. `check_tensors` found their shapes right.

    **Raises:** `CheckpointError` naming every tensor with a number that is not finite.
    """
    if not names.means:
        return None
    nothing = np.zeros((0, 0), np.float32)
    found = tuple(
        np.asarray(reader.read(names.means[layer]), np.float32) if layer in names.means else nothing
        for layer in range(config.num_layers)
    )
    broken = [names.means[layer] for layer, mean in enumerate(found) if not np.isfinite(mean).all()]
    if broken:
        raise CheckpointError("means of keys must be finite; these are not: " + ", ".join(broken))
    return found


def _kv_heads(config: ModelConfig) -> list[int]:
    """Of each layer; 0 without attention."""
    return [0 if layer.attention is None else layer.attention.num_kv_heads for layer in config.layers]


def _usable(numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Positive and finite; devices take numbers below the smallest normal one for 0."""
    usable: NDArray[np.bool_] = (numbers >= np.finfo(np.float32).tiny) & np.isfinite(numbers)
    return usable
