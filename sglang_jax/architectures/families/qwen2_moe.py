"""Qwen2 with experts (2024), also Qwen1.5: a mixture of experts, and a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts, sparse_layers
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES

_NAME = "qwen2_moe"
_DEFAULTS = Defaults(num_kv_heads=16, max_position=32768)
_DEFAULT_FIRST_WITHOUT_WINDOW = 28


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("qkv_bias")
    attention = replace(common.attention(), bias=True if bias is None else bias)
    experts = read_experts(common, num_experts=60, chosen=4, size="moe_intermediate_size", default_size=1408)
    experts = replace(
        experts,
        renormalised=fields.boolean("norm_topk_prob") or False,
        shared_size=fields.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    parts = sparse_layers(common, experts, dense_size=5632)
    layers = [
        common.pre_norm_layer(replace(attention, window=window), part)
        for window, part in zip(_windows(common), parts, strict=True)
    ]
    return common.model(_NAME, layers)


def _windows(common: CommonFields) -> list[int | None]:
    """The window of each layer: by `layer_types`, or else in every second layer below `max_window_layers`."""
    fields = common.fields
    window = fields.count_or("sliding_window", 4096)
    slides = fields.boolean("use_sliding_window") or False
    first = fields.count("max_window_layers")
    first = _DEFAULT_FIRST_WITHOUT_WINDOW if first is None else first
    sliding = [number % 2 == 0 and number < first for number in range(common.num_layers)]
    if fields.values.get("layer_types") is not None:
        sliding = common.sliding_layers(every=None)
    return [common.effective_window(window) if slides and of_layer else None for of_layer in sliding]


_GGUF_FIELDS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}

FAMILY = Family(
    name=_NAME,
    class_name="Qwen2MoeForCausalLM",
    configure=configure,
    names=EXPERTS_NAMES,
    gguf=GgufForm(name="qwen2moe", fields=_GGUF_FIELDS, experts=True),
)
