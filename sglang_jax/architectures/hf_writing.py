"""Writes a `ModelConfig` as config.json, for families whose layers are identical."""

from __future__ import annotations

from typing import Any

from sglang_jax.architectures.hf_rope import rope_to_hf
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import ModelConfig


def dense_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The common fields of a pre-norm decoder. Callers check that they express `config` by reading them back."""
    layer = config.layers[0]
    attention = layer.kv_attention
    inner = layer.feed_forward
    assert attention is not None
    assert isinstance(inner, FeedForwardConfig)
    rope = attention.rope or RopeConfig()
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": inner.size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": str(inner.activation),
        "rms_norm_eps": config.final_norm.eps,
        "rope_parameters": rope_to_hf(rope),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": attention.bias,
        "mlp_bias": inner.bias,
        "sliding_window": attention.window,
        "use_sliding_window": attention.window is not None,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
