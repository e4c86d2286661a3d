"""EuroBERT: an encoder with Llama's layers, whose tokens see all others of their text."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "eurobert"
_DEFAULTS = Defaults(max_position=8192, eps=1e-5, bos_token_id=128000, eos_token_id=128001)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    layer = common.pre_norm_layer(
        replace(common.attention(), causal=False, bias=bias, out_bias=bias),
        common.feed_forward(bias=fields.boolean("mlp_bias") or False),
    )
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(name=_NAME, class_name="EuroBertForMaskedLM", configure=configure, classifier=None)
