"""Seed-OSS (2025): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName

_NAME = "seed_oss"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=524288, head_dim=128, bos_token_id=0, eos_token_id=2)
_NAMES = {**LLAMA_NAMES, Part.FEED_FORWARD_NORM: TensorName("post_attention_layernorm", "post_attention_norm")}


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias")
    attention = replace(
        common.attention(),
        bias=True if bias is None else bias,
        out_bias=fields.boolean("attention_out_bias") or False,
    )
    layer = common.pre_norm_layer(attention, common.feed_forward(bias=fields.boolean("mlp_bias") or False))
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(
    name=_NAME, class_name="SeedOssForCausalLM", configure=configure, names=_NAMES, gguf=GgufForm(name="seed_oss")
)
