"""LFM2 (Liquid AI, 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.kinds.recurrent import ShortConvConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName

_NAME = "lfm2"
_DEFAULTS = Defaults(
    max_position=128_000,
    num_kv_heads=8,
    eps=1e-5,
    theta=1e6,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
_CONVOLUTION, _ATTENTION = "conv", "full_attention"


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    norm = common.norm("norm_eps")
    attention = replace(common.attention(), qk_norm=QKNorm(norm=norm))
    convolution = ShortConvConfig(
        channels=common.hidden_size,
        width=fields.count("conv_L_cache") or 3,
        bias=fields.boolean("conv_bias") or False,
    )
    layers = [
        LayerConfig(
            mixer=attention if kind == _ATTENTION else convolution,
            feed_forward=_feed_forward(fields),
            mixer_norms=SublayerNorms(pre=norm),
            feed_forward_norms=SublayerNorms(pre=norm),
        )
        for kind in _kinds(common)
    ]
    return common.model(_NAME, layers, norm, tied="tie_embedding")


def _kinds(common: CommonFields) -> tuple[str, ...]:
    kinds = common.kinds_of_layers(_CONVOLUTION, _ATTENTION)
    if kinds is not None:
        return kinds
    numbers = range(common.num_layers)
    attention = common.fields.integers("full_attn_idxs") if common.fields.value("full_attn_idxs") else numbers
    return tuple(_ATTENTION if number in attention else _CONVOLUTION for number in numbers)


def _feed_forward(fields: JsonFields) -> FeedForwardConfig:
    """The declared size or, unless `block_auto_adjust_ff_dim` is false, 2/3 of it times a multiplier, rounded up."""
    size = fields.count("block_ff_dim") or fields.required_integer("intermediate_size")
    adjusted = fields.boolean("block_auto_adjust_ff_dim")
    if adjusted or adjusted is None:
        multiplier = fields.number("block_ffn_dim_multiplier")
        multiple = fields.size("block_multiple_of", 256)
        size = int((1.0 if multiplier is None else multiplier) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return FeedForwardConfig(size=size)


FAMILY = Family(
    name=_NAME,
    class_name="Lfm2ForCausalLM",
    configure=configure,
    names={
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
    },
)
