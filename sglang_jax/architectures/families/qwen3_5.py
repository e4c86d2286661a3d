"""Qwen3.5 and Qwen3.6, dense text models: gated delta nets, and gated attention in every fourth layer.

For text, positions are equal on all three axes of the multimodal rotation, so it is the plain one.
"""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_rope import partial_rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName
from sglang_jax.errors import CheckpointError

_NAME = "qwen3_5_text"
_DEFAULTS = Defaults(max_position=32768, num_kv_heads=4, head_dim=256)
_LINEAR, _ATTENTION = "linear_attention", "full_attention"


def configure(fields: JsonFields) -> ModelConfig:
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    common = CommonFields.read(fields, _DEFAULTS, rope=partial_rope_from_hf(fields, context, _DEFAULTS.theta, 0.25))
    norm = replace(common.norm(), weight_in_float32=True, offset=1.0)
    bias = fields.boolean("attention_bias") or False
    attention = replace(common.attention(), qk_norm=QKNorm(norm=norm), output_gate=True, bias=bias, out_bias=bias)
    delta_net = _delta_net(common)
    layers = [
        LayerConfig(
            mixer=attention if kind == _ATTENTION else delta_net,
            feed_forward=common.feed_forward(),
            mixer_norms=SublayerNorms(pre=norm),
            feed_forward_norms=SublayerNorms(pre=norm),
        )
        for kind in _kinds(common)
    ]
    return common.model(_NAME, layers, norm)


def _delta_net(common: CommonFields) -> GatedDeltaNetConfig:
    fields = common.fields
    keys, values = fields.size("linear_num_key_heads", 16), fields.size("linear_num_value_heads", 32)
    if values % keys:
        raise CheckpointError(
            f"{fields.file}: linear_num_value_heads ({values}) must be a multiple of linear_num_key_heads ({keys})"
        )
    if (activation := fields.string("hidden_act") or "silu") != "silu":
        raise CheckpointError(
            f"{fields.file}: hidden_act {activation!r} of a delta net is not supported; supported: silu"
        )
    return GatedDeltaNetConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        width=fields.size("linear_conv_kernel_dim", 4),
        norm=common.norm(),
    )


def _kinds(common: CommonFields) -> tuple[str, ...]:
    kinds = common.kinds_of_layers(_LINEAR, _ATTENTION)
    every = common.fields.size("full_attention_interval", 4)
    if kinds is not None:
        return kinds
    return tuple(_LINEAR if (number + 1) % every else _ATTENTION for number in range(common.num_layers))


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3_5ForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        Part.STATE_INPUT: TensorName("linear_attn.in_proj_qkv"),
        Part.STATE_GATE: TensorName("linear_attn.in_proj_z"),
        Part.UPDATE_RATE: TensorName("linear_attn.in_proj_b"),
        Part.DECAY_INPUT: TensorName("linear_attn.in_proj_a"),
        Part.DECAY_BIAS: TensorName("linear_attn.dt_bias", bare=True),
        Part.DECAY_LOG: TensorName("linear_attn.A_log", bare=True),
        Part.STATE_NORM: TensorName("linear_attn.norm"),
        Part.CONVOLUTION: TensorName("linear_attn.conv1d"),
        Part.STATE_OUTPUT: TensorName("linear_attn.out_proj"),
    },
)
