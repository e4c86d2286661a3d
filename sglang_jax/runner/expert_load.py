"""How many tokens each expert was chosen by, as a runner counts them if it is asked to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Of the layer with this number, how many tokens each of its experts was chosen by: int64 `[experts]`."""

    layer: int
    tokens: Int64


def refuse_without_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` if experts are to be counted and the model has none."""
    if config.enable_expert_distribution_metrics and not any(layer.num_experts for layer in model.layers):
        raise ConfigError(
            f"enable_expert_distribution_metrics needs a model with experts, got one of {model.architecture} without "
            "any: remove the option"
        )


def load_since(before: Sequence[ExpertLoad], now: Sequence[ExpertLoad]) -> tuple[ExpertLoad, ...]:
    """What was added since `before`, which has the same layers or none."""
    if not before:
        return tuple(now)
    return tuple(ExpertLoad(one.layer, one.tokens - earlier.tokens) for earlier, one in zip(before, now, strict=True))
