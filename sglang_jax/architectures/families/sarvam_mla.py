"""Sarvam-105B (2026): DeepSeek-V3's layers, whose config.json has other names for some fields."""

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

_NAME = "sarvam_mla"
_DEFAULTS = Defaults(max_position=4096, bos_token_id=0, eos_token_id=1)
_LATENT = LatentDefaults(query_latent=None)
_EXPERTS = ExpertDefaults(num_experts=128, chosen=8, size=2048, shared=1, scale=2.5)


def configure(fields: JsonFields) -> ModelConfig:
    fields = _renamed(fields)
    common = read_common(fields, _DEFAULTS, _LATENT)
    attention = read_attention(common, _LATENT, interleaved=fields.boolean("rope_interleave") is not False)
    dense, experts = common.feed_forward(), read_balanced_experts(common, _EXPERTS)
    sparse = layers_with_experts(common, default=1)
    layers = [common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in sparse]
    return replace(common.model(_NAME, layers), mtp_layers=mtp_layers(fields, default=0))


def _renamed(fields: JsonFields) -> JsonFields:
    """The fields with DeepSeek's names. `deepseek_yarn` is YaRN; `q_head_dim` is redundant."""
    fields.value("q_head_dim")
    values = dict(fields.values)
    shared = fields.value("num_shared_experts")
    if shared is not None:
        values.setdefault("n_shared_experts", shared)
    scaling = fields.nested("rope_scaling")
    if scaling is not None and "deepseek_yarn" in (scaling.value("type"), scaling.value("rope_type")):
        values["rope_scaling"] = {**scaling.values, "type": "yarn", "rope_type": "yarn"}
    return JsonFields(values, fields.file, fields.within, fields.accessed)


FAMILY = Family(name=_NAME, class_name="SarvamMLAForCausalLM", configure=configure, names=DEEPSEEK_NAMES)
