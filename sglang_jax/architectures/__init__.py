"""What models are made of: families of checkpoints, lists of layers, and one manifest of parameters for each model.

Framework-free. A family is a module of `families/`: see `registry`.
"""

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
    SideBySide,
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
    "QKNorm",
    "RecurrentConfig",
    "RopeConfig",
    "RopeKind",
    "ShortConvConfig",
    "SideBySide",
    "StateArray",
    "StateDtype",
    "SublayerNorms",
    "cache_groups",
    "group_names",
]
