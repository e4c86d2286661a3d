"""SmolLM3 (2025): Llama with layers without positions, by default every fourth."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.rotated_layers import rotated_layers

_NAME = "smollm3"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    max_position=32768,
    theta=2e6,
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_id=128001,
)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    feed_forward = common.feed_forward(bias=fields.boolean("mlp_bias") or False)
    attention = replace(common.attention(), bias=bias, out_bias=bias)
    rotated = rotated_layers(common)
    window = common.effective_window(fields.count("sliding_window")) if fields.boolean("use_sliding_window") else None
    sliding = [not rotates for rotates in rotated]
    if fields.strings("layer_types") is not None:
        sliding = common.sliding_layers(every=None)
    layers = [
        common.pre_norm_layer(
            replace(attention, rope=common.rope if rotates else None, window=window if slides else None), feed_forward
        )
        for rotates, slides in zip(rotated, sliding, strict=True)
    ]
    return common.model(_NAME, layers)


FAMILY = Family(
    name=_NAME,
    class_name="SmolLM3ForCausalLM",
    configure=configure,
    gguf=GgufForm(name="smollm3", interleaved=True),
)
