"""Shared by LFM2's families: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.recurrent import ShortConvConfig
from sglang_jax.architectures.model_config import FeedForward, LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName, TensorNames

LFM2_DEFAULTS = Defaults(
    max_position=128_000,
    num_kv_heads=8,
    eps=1e-5,
    theta=1e6,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
_CONVOLUTION, _ATTENTION = "conv", "full_attention"

LFM2_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.FINAL_NORM: TensorName("model.embedding_norm"),
    Part.ATTENTION_NORM: TensorName("operator_norm"),
    Part.FEED_FORWARD_NORM: TensorName("ffn_norm"),
    Part.OUTPUT: TensorName("self_attn.out_proj"),
    Part.QUERY_NORM: TensorName("self_attn.q_layernorm"),
    Part.KEY_NORM: TensorName("self_attn.k_layernorm"),
    Part.STATE_INPUT: TensorName("conv.in_proj"),
    Part.CONVOLUTION: TensorName("conv.conv"),
    Part.STATE_OUTPUT: TensorName("conv.out_proj"),
    Part.GATE: TensorName("feed_forward.w1"),
    Part.UP: TensorName("feed_forward.w3"),
    Part.DOWN: TensorName("feed_forward.w2"),
}


def lfm2_model(name: str, common: CommonFields, parts: Sequence[FeedForward]) -> ModelConfig:
    """A model of the family `name` with these feed-forward parts, one per layer. Raises `CheckpointError` for
    inconsistent or unsupported fields."""
    fields, norm = common.fields, common.norm("norm_eps")
    attention = replace(common.attention(), qk_norm=QKNorm(norm=norm))
    convolution = ShortConvConfig(
        channels=common.hidden_size,
        width=fields.count("conv_L_cache") or 3,
        bias=fields.boolean("conv_bias") or False,
    )
    norms = SublayerNorms(pre=norm)
    layers = [
        LayerConfig(
            mixer=attention if kind == _ATTENTION else convolution,
            feed_forward=part,
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for kind, part in zip(_kinds(common), parts, strict=True)
    ]
    return common.model(name, layers, norm, tied="tie_embedding")


def _kinds(common: CommonFields) -> tuple[str, ...]:
    kinds = common.kinds_of_layers(_CONVOLUTION, _ATTENTION)
    if kinds is not None:
        return kinds
    numbers = range(common.num_layers)
    attention = common.fields.integers("full_attn_idxs") if common.fields.value("full_attn_idxs") else numbers
    return tuple(_ATTENTION if number in attention else _CONVOLUTION for number in numbers)
