"""GLM-4.7-Flash (2026): latent attention with values wider than keys, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
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
from sglang_jax.errors import CheckpointError

_NAME = "glm4_moe_lite"
_DEFAULTS = Defaults(max_position=202752, eps=1e-5, bos_token_id=0, eos_token_id=1)
_LATENT = LatentDefaults(query_latent=768, key_dim=192, value_dim=256)
_EXPERTS = ExpertDefaults(num_experts=64, chosen=4, size=1536, shared=1, scale=1.8)
_DENSE, _SPARSE = "dense", "sparse"


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS, _LATENT)
    attention = read_attention(common, _LATENT, interleaved=fields.boolean("rope_interleave") is not False)
    dense, experts = common.feed_forward(), read_balanced_experts(common, _EXPERTS)
    sparse = _sparse_layers(common)
    layers = [common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in sparse]
    return replace(common.model(_NAME, layers), mtp_layers=mtp_layers(fields, default=0))


def _sparse_layers(common: CommonFields) -> list[bool]:
    """Whether each layer has experts: by `mlp_layer_types`, or else all except the first."""
    first = layers_with_experts(common, default=1)
    types = common.fields.strings("mlp_layer_types")
    if types is None:
        return first
    unknown = sorted(set(types) - {_DENSE, _SPARSE})
    if unknown or len(types) != common.num_layers:
        seen = ", ".join(unknown) or f"{len(types)} entries for {common.num_layers} layers"
        raise CheckpointError(
            f"{common.fields.file}: mlp_layer_types has {seen}; supported: {_DENSE} or {_SPARSE} for each layer"
        )
    return [kind == _SPARSE for kind in types]


FAMILY = Family(name=_NAME, class_name="Glm4MoeLiteForCausalLM", configure=configure, names=DEEPSEEK_NAMES)
