"""Granite with windows (2026), dense: Granite's multipliers, a learnt sink in every head, and a separate rope, or
none, in each layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.errors import CheckpointError

_NAME = "granite_swa"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    max_position=8192,
    eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=100257,
    eos_token_id=100257,
)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    attention = replace(
        common.attention(),
        scale=fields.positive("attention_multiplier", 1.0),
        sinks=True,
        bias=bias,
        out_bias=bias,
    )
    feed_forward = common.feed_forward(bias=fields.boolean("mlp_bias") or False)
    window = common.effective_window(fields.count_or("sliding_window", 128))
    slides = [bool(number % 4) for number in range(common.num_layers)]
    if fields.strings("layer_types") is not None:
        slides = common.sliding_layers(every=None)
    layers = [
        replace(
            common.pre_norm_layer(replace(attention, rope=rope, window=window if sliding else None), feed_forward),
            residual_multiplier=fields.positive("residual_multiplier", 1.0),
        )
        for rope, sliding in zip(_ropes(common), slides, strict=True)
    ]
    return replace(
        common.model(_NAME, layers),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        logit_multiplier=1 / fields.positive("logits_scaling", 1.0),
    )


def _ropes(common: CommonFields) -> list[RopeConfig | None]:
    """The rope of each layer. `layer_rope_theta` has the base of each, or 0 for a layer without positions."""
    thetas = common.fields.value("layer_rope_theta")
    if thetas is None:
        return [common.rope] * common.num_layers
    numbers = thetas if isinstance(thetas, list) else []
    known = [theta for theta in numbers if type(theta) in (int, float) and 0 <= theta < float("inf")]
    if len(numbers) != common.num_layers or len(known) != len(numbers):
        raise CheckpointError(
            f"{common.fields.file}: layer_rope_theta is {thetas!r:.80}, it must be a number for each of "
            f"{common.num_layers} layers"
        )
    return [replace(common.rope, theta=float(theta)) if theta else None for theta in known]


FAMILY = Family(name=_NAME, class_name="GraniteSWAForCausalLM", configure=configure)
