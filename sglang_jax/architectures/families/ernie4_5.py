"""ERNIE 4.5 (2025), dense: Llama with adjacent rotary pairs."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm

_NAME = "ernie4_5"
_DEFAULTS = Defaults(
    num_kv_heads=2,
    head_dim=128,
    max_position=131072,
    eps=1e-5,
    theta=5e5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("use_bias") or False
    attention = replace(common.attention(), interleaved_rope=True, bias=bias, out_bias=bias)
    layer = common.pre_norm_layer(attention, common.feed_forward(bias=bias))
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(name=_NAME, class_name="Ernie4_5ForCausalLM", configure=configure, gguf=GgufForm(name="ernie4_5"))
