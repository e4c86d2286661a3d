"""Fields that families with latent attention share: its sizes, and the scale of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.deepseek_experts_form import DEEPSEEK_EXPERTS_NAMES
from sglang_jax.architectures.hf_rope import rope_parameters
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.architectures.tensor_names import LATENT_NAMES, LLAMA_NAMES, TensorNames
from sglang_jax.errors import CheckpointError

DENSE_LATENT_NAMES: TensorNames = {**LLAMA_NAMES, **LATENT_NAMES}
"""Names of families without experts."""

DEEPSEEK_NAMES: TensorNames = {**DEEPSEEK_EXPERTS_NAMES, **LATENT_NAMES}
"""Names of families with DeepSeek's experts."""

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors, which does not depend on `rms_norm_eps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDefaults:
    """transformers' defaults for the sizes of latent attention. `value_dim` 0: hidden size / heads."""

    latent: int = 512
    query_latent: int | None = 1536
    key_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128


def read_common(
    fields: JsonFields, defaults: Defaults, latent: LatentDefaults, *, rope: RopeConfig | None = None
) -> CommonFields:
    """Reads the common fields, with `qk_rope_head_dim`, the rotated numbers of a head, in place of `head_dim`."""
    rotary_dim = fields.size("qk_rope_head_dim", latent.rotary_dim)
    silent = JsonFields({**fields.values, "head_dim": rotary_dim}, fields.file, fields.within, fields.accessed)
    return replace(CommonFields.read(silent, defaults, rope=rope), fields=fields)


def read_attention(common: CommonFields, defaults: LatentDefaults, *, interleaved: bool) -> LatentAttentionConfig:
    """Reads latent attention. `interleaved`: see `LatentAttentionConfig.interleaved_rope`."""
    fields = common.fields
    key_dim = fields.size("qk_nope_head_dim", defaults.key_dim)
    of_query = fields.count_or("q_lora_rank", defaults.query_latent)
    if of_query == 0:
        raise CheckpointError(f"{fields.file}: q_lora_rank is 0, it must be at least 1, or null")
    bias = fields.boolean("attention_bias") or False
    return LatentAttentionConfig(
        num_heads=common.num_heads,
        latent=fields.size("kv_lora_rank", defaults.latent),
        query_latent=of_query,
        key_dim=key_dim,
        rotary_dim=common.head_dim,
        value_dim=fields.size("v_head_dim", defaults.value_dim or common.hidden_size // common.num_heads),
        scale=(key_dim + common.head_dim) ** -0.5 * _temperature(fields, common.rope),
        rope=common.rope,
        norm=NormConfig(eps=_LATENT_EPS),
        interleaved_rope=interleaved,
        bias=bias,
        out_bias=bias,
    )


def _temperature(fields: JsonFields, rope: RopeConfig) -> float:
    """The factor of scores: for scaling of any kind with `mscale_all_dim`, the square of YaRN's temperature."""
    mscale = rope_parameters(fields).number("mscale_all_dim")
    if rope.kind is RopeKind.DEFAULT or not mscale or rope.factor <= 1.0:
        return 1.0
    return (0.1 * mscale * math.log(rope.factor) + 1.0) ** 2
