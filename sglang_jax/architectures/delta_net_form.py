"""Shared by families with gated delta nets in most layers and gated attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_rope import partial_rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig
from sglang_jax.architectures.model_config import FeedForward, LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.tensor_names import Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError

_LINEAR, _ATTENTION = "linear_attention", "full_attention"

DELTA_NET_NAMES: TensorNames = {
    Part.DECAY_BIAS: TensorName("linear_attn.dt_bias", bare=True),
    Part.DECAY_LOG: TensorName("linear_attn.A_log", bare=True),
    Part.STATE_NORM: TensorName("linear_attn.norm"),
    Part.CONVOLUTION: TensorName("linear_attn.conv1d"),
    Part.STATE_OUTPUT: TensorName("linear_attn.out_proj"),
}
"""Names of the tensors of a delta net, without the projections of its input."""

SEPARATE_INPUT_NAMES: TensorNames = {
    Part.STATE_INPUT: TensorName("linear_attn.in_proj_qkv"),
    Part.STATE_GATE: TensorName("linear_attn.in_proj_z"),
    Part.UPDATE_RATE: TensorName("linear_attn.in_proj_b"),
    Part.DECAY_INPUT: TensorName("linear_attn.in_proj_a"),
}
"""Names of Qwen3.5's projections of a delta net's input."""


def read_common(fields: JsonFields, defaults: Defaults) -> CommonFields:
    """Reads the common fields; a quarter of each head rotates by default."""
    context = fields.size("max_position_embeddings", defaults.max_position)
    return CommonFields.read(fields, defaults, rope=partial_rope_from_hf(fields, context, defaults.theta, 0.25))


def delta_net_model(
    name: str, common: CommonFields, parts: Sequence[FeedForward], *, fused_by_key_head: bool = False
) -> ModelConfig:
    """A model of the family `name` with these feed-forward parts, one per layer. `fused_by_key_head`: see
    `GatedDeltaNetConfig`. Raises `CheckpointError` for inconsistent or unsupported fields."""
    norm = replace(common.norm(), weight_in_float32=True, offset=1.0)
    norms = SublayerNorms(pre=norm)
    attention, delta_net = _attention(common, norm), _delta_net(common, fused_by_key_head)
    layers = [
        LayerConfig(
            mixer=attention if kind == _ATTENTION else delta_net,
            feed_forward=part,
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for kind, part in zip(_kinds(common), parts, strict=True)
    ]
    return common.model(name, layers, norm)


def _attention(common: CommonFields, norm: NormConfig) -> AttentionConfig:
    fields = common.fields
    if fields.boolean("attn_output_gate") is False:
        raise CheckpointError(f"{fields.file}: attn_output_gate is false; only true is supported")
    bias = fields.boolean("attention_bias") or False
    return replace(common.attention(), qk_norm=QKNorm(norm=norm), output_gate=True, bias=bias, out_bias=bias)


def _delta_net(common: CommonFields, fused_by_key_head: bool) -> GatedDeltaNetConfig:
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
        fused_by_key_head=fused_by_key_head,
    )


def _kinds(common: CommonFields) -> tuple[str, ...]:
    kinds = common.kinds_of_layers(_LINEAR, _ATTENTION)
    every = common.fields.size("full_attention_interval", 4)
    if kinds is not None:
        return kinds
    return tuple(_LINEAR if (number + 1) % every else _ATTENTION for number in range(common.num_layers))
