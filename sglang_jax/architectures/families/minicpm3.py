"""MiniCPM3 (2024), dense: latent attention, with multipliers of embeddings, residuals and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.hf_rope import length_independent_longrope
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.latent_form import DENSE_LATENT_NAMES, LatentDefaults, read_attention, read_common
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family

_NAME = "minicpm3"
_DEFAULTS = Defaults(max_position=32768, eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
_LATENT = LatentDefaults(latent=256, query_latent=768, key_dim=64, rotary_dim=32, value_dim=0)


def configure(fields: JsonFields) -> ModelConfig:
    rope = length_independent_longrope(
        fields,
        max_position=fields.size("max_position_embeddings", _DEFAULTS.max_position),
        default_theta=_DEFAULTS.theta,
        rotary_dim=fields.size("qk_rope_head_dim", _LATENT.rotary_dim),
    )
    common = read_common(fields, _DEFAULTS, _LATENT, rope=rope)
    attention = read_attention(common, _LATENT, interleaved=False)
    feed_forward = common.feed_forward(bias=fields.boolean("mlp_bias") or False)
    depth = _multiplier(fields, "scale_depth", 1.4, neutral=math.sqrt(common.num_layers))
    layer = replace(
        common.pre_norm_layer(attention, feed_forward), residual_multiplier=depth / math.sqrt(common.num_layers)
    )
    base = _multiplier(fields, "dim_model_base", 256.0, neutral=float(common.hidden_size))
    return replace(
        common.model(_NAME, [layer] * common.num_layers),
        embedding_multiplier=_multiplier(fields, "scale_emb", 12.0, neutral=1.0),
        logit_multiplier=base / common.hidden_size,
    )


def _multiplier(fields: JsonFields, name: str, default: float, *, neutral: float) -> float:
    """Reads a number above 0: `default` if the field is absent, `neutral` for null."""
    return fields.positive(name, neutral if name in fields.values else default)


FAMILY = Family(name=_NAME, class_name="MiniCPM3ForCausalLM", configure=configure, names=DENSE_LATENT_NAMES)
