"""Descriptions of models, independent of JAX and torch: families of checkpoints (`registry`), lists of layers
(`ModelConfig`), and the manifest of a model's parameters (`manifest`)."""

from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.kinds.feed_forward import Activation, FeedForwardConfig
from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.architectures.kinds.recurrent import (
    GatedDeltaNetConfig,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
    StateArray,
    StateDtype,
)
from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.architectures.model_config import (
    CacheGroup,
    CacheKind,
    LayerConfig,
    ModelConfig,
    ParallelMixer,
    SublayerNorms,
    cache_groups,
    group_names,
)

__all__ = [
    "Activation",
    "AttentionConfig",
    "CacheGroup",
    "CacheKind",
    "FeedForwardConfig",
    "GatedDeltaNetConfig",
    "LayerConfig",
    "Mamba2Config",
    "ModelConfig",
    "NormConfig",
    "NormKind",
    "ParallelMixer",
    "QKNorm",
    "RecurrentConfig",
    "RopeConfig",
    "RopeKind",
    "ShortConvConfig",
    "StateArray",
    "StateDtype",
    "SublayerNorms",
    "cache_groups",
    "group_names",
]
