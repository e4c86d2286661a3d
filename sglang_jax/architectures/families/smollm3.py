"""SmolLM3 (2025): Llama with layers without positions, by default every fourth."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.errors import CheckpointError

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
    rotated = _rotated_layers(common)
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


def _rotated_layers(common: CommonFields) -> list[bool]:
    """Whether each layer rotates: despite its name, `no_rope_layers` has 1 for a layer that does."""
    fields = common.fields
    every = fields.size("no_rope_layer_interval", 4)
    given = fields.integers("no_rope_layers")
    if not given:
        return [bool((number + 1) % every) for number in range(common.num_layers)]
    if len(given) < common.num_layers:
        raise CheckpointError(
            f"{fields.file}: no_rope_layers has {len(given)} entries, it must have one for each of "
            f"{common.num_layers} layers"
        )
    return [bool(rotates) for rotates in given[: common.num_layers]]


FAMILY = Family(
    name=_NAME,
    class_name="SmolLM3ForCausalLM",
    configure=configure,
    gguf=GgufForm(name="smollm3", interleaved=True),
)
