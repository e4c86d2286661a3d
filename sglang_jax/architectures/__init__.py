"""What models are made of: families of checkpoints, lists of layers, and one manifest of parameters for each model.

Framework-free. A family is a module of `families/`: see `registry`.
"""

from sglang_jax.architectures.model_config import (
    Activation,
    AttentionConfig,
    CacheGroup,
    CacheKind,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    NormConfig,
    NormKind,
    QKNorm,
    RecurrentConfig,
    RopeConfig,
    RopeKind,
    ShortConvConfig,
    SideBySide,
    StateArray,
    StateDtype,
    SublayerNorms,
    cache_groups,
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
]
