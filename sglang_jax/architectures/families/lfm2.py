"""LFM2 (Liquid AI, 2025): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.lfm2_form import LFM2_DEFAULTS, LFM2_NAMES, lfm2_model
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "lfm2"


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, LFM2_DEFAULTS)
    return lfm2_model(_NAME, common, [_feed_forward(fields)] * common.num_layers)


def _feed_forward(fields: JsonFields) -> FeedForwardConfig:
    """The declared size or, unless `block_auto_adjust_ff_dim` is false, 2/3 of it times a multiplier, rounded up."""
    size = fields.count("block_ff_dim") or fields.required_integer("intermediate_size")
    adjusted = fields.boolean("block_auto_adjust_ff_dim")
    if adjusted or adjusted is None:
        multiplier = fields.number("block_ffn_dim_multiplier")
        multiple = fields.size("block_multiple_of", 256)
        size = int((1.0 if multiplier is None else multiplier) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    return FeedForwardConfig(size=size)


FAMILY = Family(name=_NAME, class_name="Lfm2ForCausalLM", configure=configure, names=LFM2_NAMES)
