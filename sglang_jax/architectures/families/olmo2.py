"""OLMo 2 (2024): norms after each block, none before it, and norms over all query heads and over all key heads."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import POST_NORM_NAMES

_NAME = "olmo2"
_DEFAULTS = Defaults(max_position=2048, eps=1e-5, eos_token_id=50279)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    norm = replace(common.norm(), weight_in_float32=True)
    bias = fields.boolean("attention_bias") or False
    layer = LayerConfig(
        mixer=replace(common.attention(), qk_norm=QKNorm(norm=norm, whole=True), bias=bias, out_bias=bias),
        feed_forward=common.feed_forward(),
        mixer_norms=SublayerNorms(post=norm),
        feed_forward_norms=SublayerNorms(post=norm),
    )
    return common.model(_NAME, [layer] * common.num_layers, norm)


FAMILY = Family(
    name=_NAME,
    class_name="Olmo2ForCausalLM",
    configure=configure,
    names=POST_NORM_NAMES,
    gguf=GgufForm(name="olmo2"),
)
