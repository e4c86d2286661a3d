"""Mistral (Jiang et al. 2023): Llama; some versions have a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_writing import dense_to_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, Multimodal

_NAME = "mistral"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=131072, bos_token_id=1, eos_token_id=2)
_DEFAULT_WINDOW = 4096


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    window = fields.count("sliding_window") if "sliding_window" in fields.values else _DEFAULT_WINDOW
    attention = replace(common.attention(), window=common.effective_window(window))
    layer = common.pre_norm_layer(attention, common.feed_forward())
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="MistralForCausalLM",
    configure=configure,
    to_hf=dense_to_hf,
    multimodal=Multimodal(class_name="Mistral3ForConditionalGeneration"),
)
