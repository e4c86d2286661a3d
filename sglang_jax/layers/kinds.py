"""The class that computes each kind of part on the JAX backend, by type of config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig, UngatedConfig
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from sglang_jax.errors import ConfigError
from sglang_jax.layers.attention import Attention
from sglang_jax.layers.experts import Experts
from sglang_jax.layers.feed_forward import FeedForward, Ungated
from sglang_jax.layers.latent_attention import LatentAttention
from sglang_jax.layers.part import LayerPart, PartOptions
from sglang_jax.layers.recurrent import GatedDeltaNet, Mamba2, ShortConv

CLASSES: Mapping[type, Callable[[Any, PartOptions], LayerPart]] = {
    AttentionConfig: Attention,
    LatentAttentionConfig: LatentAttention,
    ShortConvConfig: ShortConv,
    GatedDeltaNetConfig: GatedDeltaNet,
    Mamba2Config: Mamba2,
    FeedForwardConfig: FeedForward,
    UngatedConfig: Ungated,
    ExpertsConfig: Experts,
}


def build_part(config: object, options: PartOptions, layer: int) -> LayerPart:
    """Builds the part of a config, without values. Raises `ConfigError` naming the layer, if this backend does not have
    this kind."""
    build = CLASSES.get(type(config))
    if build is None:
        kind = type(config).__name__.removesuffix("Config")
        raise ConfigError(f"layer {layer} is of kind {kind}, which the JAX backend does not have")
    return build(config, options)
