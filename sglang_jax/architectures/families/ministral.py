"""Ministral (2024): Mistral with windows in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "ministral"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=131072, bos_token_id=1, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    window = common.effective_window(fields.count_or("sliding_window", 4096))
    slides = [True] * common.num_layers
    if fields.strings("layer_types") is not None:
        slides = common.sliding_layers(every=None)
    layers = [
        common.pre_norm_layer(replace(common.attention(), window=window if sliding else None), common.feed_forward())
        for sliding in slides
    ]
    return common.model(_NAME, layers)


FAMILY = Family(name=_NAME, class_name="MinistralForCausalLM", configure=configure)
