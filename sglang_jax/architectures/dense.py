"""Builds Llama-like models, whose layers are identical, from a few numbers."""

from __future__ import annotations

from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.kinds.feed_forward import Activation, FeedForwardConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms


def dense_decoder(
    *,
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float,
    rope: RopeConfig,
    max_position: int,
    tie_word_embeddings: bool,
    eos_token_ids: tuple[int, ...],
    attention_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    bos_token_id: int | None = None,
    dtype: str = "bfloat16",
) -> ModelConfig:
    """A model with RMS norms before attention and before SwiGLU. `qk_norm`: norms of each query and key head."""
    norm = NormConfig(eps=rms_norm_eps)
    layer = LayerConfig(
        mixer=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=window,
            qk_norm=QKNorm(norm=norm) if qk_norm else None,
            bias=attention_bias,
            out_bias=attention_out_bias,
        ),
        feed_forward=FeedForwardConfig(size=intermediate_size, activation=Activation.SILU, bias=mlp_bias),
        mixer_norms=SublayerNorms(pre=norm),
        feed_forward_norms=SublayerNorms(pre=norm),
    )
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        final_norm=norm,
        max_position=max_position,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        dtype=dtype,
    )
