"""Qwen3 with experts (2025): Qwen3 whose feed-forward parts are mixtures of experts, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts, sparse_layers
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES

_NAME = "qwen3_moe"
_DEFAULTS = Defaults(num_kv_heads=4, max_position=32768)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    window = fields.count_or("sliding_window", 4096)
    attention = replace(
        common.attention(),
        bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(norm=common.norm()),
        window=common.effective_window(window) if fields.boolean("use_sliding_window") else None,
    )
    experts = read_experts(common, num_experts=128, chosen=8, size="moe_intermediate_size", default_size=768)
    experts = replace(experts, renormalised=fields.boolean("norm_topk_prob") or False)
    layers = [common.pre_norm_layer(attention, part) for part in sparse_layers(common, experts, dense_size=6144)]
    return common.model(_NAME, layers)


_GGUF_FIELDS = {"moe_intermediate_size": "expert_feed_forward_length", "norm_topk_prob": "expert_weights_norm"}


def _norms_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF files may lack this field, because it is true for all of these models and llama.cpp assumes it."""
    return {"norm_topk_prob": True}


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3MoeForCausalLM",
    configure=configure,
    names=EXPERTS_NAMES,
    gguf=GgufForm(name="qwen3moe", fields=_GGUF_FIELDS, derive=_norms_weights, experts=True),
)
