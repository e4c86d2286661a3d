"""Youtu-LLM (2025): latent attention, dense."""

from __future__ import annotations

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.latent_form import DENSE_LATENT_NAMES, LatentDefaults, read_attention, read_common
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "youtu"
_DEFAULTS = Defaults(max_position=131072, tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001)
_LATENT = LatentDefaults()


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS, _LATENT)
    attention = read_attention(common, _LATENT, interleaved=fields.boolean("rope_interleave") is not False)
    return common.model(_NAME, [common.pre_norm_layer(attention, common.feed_forward())] * common.num_layers)


FAMILY = Family(name=_NAME, class_name="YoutuForCausalLM", configure=configure, names=DENSE_LATENT_NAMES)
