"""Qwen3.5 and Qwen3.6 with experts, text models: Qwen3.5 whose feed-forward parts are Qwen3-Next's experts."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.delta_net_form import (
    DELTA_NET_NAMES,
    SEPARATE_INPUT_NAMES,
    delta_net_model,
    read_common,
)
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, Multimodal
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES

_NAME = "qwen3_5_moe_text"
_DEFAULTS = Defaults(max_position=32768, num_kv_heads=2, head_dim=256)


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS)
    fields.value("intermediate_size")  # no layer is dense
    experts = replace(
        read_experts(common, num_experts=256, chosen=8, size="moe_intermediate_size", default_size=512),
        renormalised=True,
        shared_size=fields.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return delta_net_model(_NAME, common, [experts] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3_5MoeForCausalLM",
    configure=configure,
    names={**EXPERTS_NAMES, **DELTA_NET_NAMES, **SEPARATE_INPUT_NAMES},
    multimodal=Multimodal(class_name="Qwen3_5MoeForConditionalGeneration"),
)
