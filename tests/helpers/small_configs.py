"""Configs of models that need no checkpoint; separate from `tiny_models`, which imports torch."""

from __future__ import annotations

from typing import Any

from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.checkpoint import ModelConfig, RopeConfig

_SMALL: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(),
    "max_position": 256,
    "tie_word_embeddings": True,
    "eos_token_ids": (2,),
}


def small_config(**changes: Any) -> ModelConfig:
    """Llama of two layers, 32 wide, with tied embeddings and no biases, except for `changes` (see `dense_decoder`)."""
    return dense_decoder(**_SMALL | changes)
