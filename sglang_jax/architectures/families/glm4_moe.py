"""GLM-4.5, 4.6 and 4.7 (2025): heads of which half rotates, and DeepSeek-V3's experts after the first layers."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.deepseek_experts_form import (
    DEEPSEEK_EXPERTS_NAMES,
    ExpertDefaults,
    layers_with_experts,
    mtp_layers,
    read_balanced_experts,
)
from sglang_jax.architectures.hf_rope import partial_rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "glm4_moe"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=131072, eps=1e-5)
_EXPERTS = ExpertDefaults(num_experts=128, chosen=8, size=1408, shared=1)


def configure(fields: JsonFields) -> ModelConfig:
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    common = CommonFields.read(fields, _DEFAULTS, rope=partial_rope_from_hf(fields, context, _DEFAULTS.theta, 0.5))
    attention = replace(
        common.attention(),
        bias=fields.boolean("attention_bias") or False,
        qk_norm=QKNorm(norm=common.norm()) if fields.boolean("use_qk_norm") else None,
    )
    dense, experts = common.feed_forward(), read_balanced_experts(common, _EXPERTS)
    sparse = layers_with_experts(common, default=1)
    layers = [common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in sparse]
    return replace(common.model(_NAME, layers), mtp_layers=mtp_layers(fields, default=1))


FAMILY = Family(name=_NAME, class_name="Glm4MoeForCausalLM", configure=configure, names=DEEPSEEK_EXPERTS_NAMES)
