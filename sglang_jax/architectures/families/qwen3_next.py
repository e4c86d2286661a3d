"""Qwen3-Next (2025): gated delta nets, gated attention in every fourth layer, and experts with a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.delta_net_form import DELTA_NET_NAMES, delta_net_model, read_common
from sglang_jax.architectures.experts_form import read_experts, sparse_layers
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES, Part, TensorName

_NAME = "qwen3_next"
_DEFAULTS = Defaults(max_position=32768, num_kv_heads=2, head_dim=256)


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS)
    experts = read_experts(common, num_experts=512, chosen=10, size="moe_intermediate_size", default_size=512)
    renormalised = fields.boolean("norm_topk_prob")
    experts = replace(
        experts,
        renormalised=True if renormalised is None else renormalised,
        shared_size=fields.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    parts = sparse_layers(common, experts, dense_size=5632)
    return delta_net_model(_NAME, common, parts, fused_by_key_head=True)


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3NextForCausalLM",
    configure=configure,
    names={
        **EXPERTS_NAMES,
        **DELTA_NET_NAMES,
        Part.STATE_INPUT: TensorName("linear_attn.in_proj_qkvz"),
        Part.UPDATE_RATE: TensorName("linear_attn.in_proj_ba"),
    },
)
