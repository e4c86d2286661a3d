"""Options for models with experts, and counts of tokens per expert, which runners keep on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import EngineConfig, ModelImpl
from sglang_jax.errors import ConfigError

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The tokens that chose each expert of the layer with index `layer`: int64 `[experts]`."""

    layer: int
    tokens: Int64


def refuse_without_experts(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` if the options are about experts and the model has none."""
    if config.expert_parts > 1 and config.model_impl is ModelImpl.TRANSFORMERS:
        raise ConfigError(
            f"ep_size {config.expert_parts} does not support model_impl transformers: choose native, or ep_size 1"
        )
    if any(layer.num_experts for layer in model.layers):
        return
    if config.expert_parts > 1:
        raise ConfigError(
            f"ep_size {config.expert_parts} needs a model with experts, got one of {model.architecture} without any: "
            "remove the option"
        )
    if config.enable_expert_distribution_metrics:
        raise ConfigError(
            f"enable_expert_distribution_metrics needs a model with experts, got one of {model.architecture} without "
            "any: remove the option"
        )


def load_since(before: Sequence[ExpertLoad], now: Sequence[ExpertLoad]) -> tuple[ExpertLoad, ...]:
    """The difference to the counts `before`, which have the same layers or none."""
    if not before:
        return tuple(now)
    return tuple(ExpertLoad(one.layer, one.tokens - earlier.tokens) for earlier, one in zip(before, now, strict=True))
