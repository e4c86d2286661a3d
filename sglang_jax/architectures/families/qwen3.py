"""Qwen3 (dense): norms of each query and key head; upper layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_writing import dense_to_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.qwen_windows import qwen_windows
from sglang_jax.architectures.registry import Family, GgufForm, Multimodal

_NAME = "qwen3"
_DEFAULTS = Defaults(num_kv_heads=32, max_position=32768, head_dim=128)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    attention = replace(common.attention(), bias=bias, out_bias=bias, qk_norm=QKNorm(norm=common.norm()))
    layers = [
        common.pre_norm_layer(replace(attention, window=window), common.feed_forward())
        for window in qwen_windows(common)
    ]
    return common.model(_NAME, layers)


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3ForCausalLM",
    configure=configure,
    gguf=GgufForm(name="qwen3"),
    to_hf=dense_to_hf,
    multimodal=Multimodal(class_name="Qwen3VLForConditionalGeneration", text_type="qwen3_vl_text"),
)
