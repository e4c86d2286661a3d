"""DeepSeek-V3 and R1 (2024), and Kimi-K2 (2025), which has the same class: latent attention; experts chosen from groups
by sigmoid scores with a correction. Multi-token-prediction layers are not used."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.deepseek_experts_form import (
    ExpertDefaults,
    layers_with_experts,
    mtp_layers,
    read_balanced_experts,
)
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.latent_form import DEEPSEEK_NAMES, LatentDefaults, read_attention, read_common
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "deepseek_v3"
_DEFAULTS = Defaults(max_position=4096, bos_token_id=0, eos_token_id=1)
_LATENT = LatentDefaults()
_EXPERTS = ExpertDefaults(num_experts=256, chosen=8, size=2048, shared=1, scale=2.5, groups=8, chosen_groups=4)


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS, _LATENT)
    attention = read_attention(common, _LATENT, interleaved=fields.boolean("rope_interleave") is not False)
    dense, experts = common.feed_forward(), read_balanced_experts(common, _EXPERTS)
    sparse = layers_with_experts(common, default=3)
    layers = [common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in sparse]
    return replace(common.model(_NAME, layers), mtp_layers=mtp_layers(fields, default=1))


FAMILY = Family(name=_NAME, class_name="DeepseekV3ForCausalLM", configure=configure, names=DEEPSEEK_NAMES)
