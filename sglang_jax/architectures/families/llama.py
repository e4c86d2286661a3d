"""Llama 2 and 3, and the many models with the same layers."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_writing import dense_to_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm

_NAME = "llama"
_DEFAULTS = Defaults(max_position=2048, bos_token_id=1, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    layer = common.pre_norm_layer(
        replace(common.attention(), bias=bias, out_bias=bias),
        common.feed_forward(bias=fields.boolean("mlp_bias") or False),
    )
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="LlamaForCausalLM",
    configure=configure,
    gguf=GgufForm(name="llama", interleaved=True),
    to_hf=dense_to_hf,
)
