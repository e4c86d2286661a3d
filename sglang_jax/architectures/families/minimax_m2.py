"""MiniMax-M2 (2025): norms over all query heads and over all key heads, heads of which a part rotates, and experts
chosen by corrected sigmoid scores in every layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.hf_rope import partial_rope_from_hf
from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.experts import ExpertScores
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import MIXTRAL_NAMES, Part, TensorName
from sglang_jax.errors import CheckpointError, quote

_NAME = "minimax_m2"
_DEFAULTS = Defaults(
    num_kv_heads=8, head_dim=128, max_position=196608, theta=5e6, bos_token_id=200034, eos_token_id=200020
)
_REQUIRED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0,
    "use_mtp": True,
}
"""Fields of the first files that have one value in all released models; transformers' class does not read them."""


def configure(fields: JsonFields) -> ModelConfig:
    for name, value in _REQUIRED.items():
        if (found := fields.value(name)) not in (None, value):
            raise CheckpointError(f"{fields.file}: {name} is {quote(found)}; supported: {quote(value)}")
    if set(fields.integers("attn_type_list")) - {1}:
        raise CheckpointError(f"{fields.file}: attn_type_list has linear attention; only 1 is supported in all layers")
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    head_dim = fields.size("head_dim", _DEFAULTS.head_dim or 128)
    share = fields.size("rotary_dim", head_dim) / head_dim
    common = CommonFields.read(fields, _DEFAULTS, rope=partial_rope_from_hf(fields, context, _DEFAULTS.theta, share))
    attention = replace(common.attention(), qk_norm=QKNorm(norm=common.norm(), whole=True))
    experts = replace(
        read_experts(common, num_experts=256, chosen=8),
        scores=ExpertScores.SIGMOID,
        correction=True,
        renormalised=True,
    )
    model = common.model(_NAME, [common.pre_norm_layer(attention, experts)] * common.num_layers)
    each = fields.size("mtp_transformer_layers", 1)
    return replace(model, mtp_layers=(fields.count("num_mtp_modules", MAX_LAYERS) or 0) * each)


FAMILY = Family(
    name=_NAME,
    class_name="MiniMaxM2ForCausalLM",
    configure=configure,
    names={
        **MIXTRAL_NAMES,
        Part.ROUTER_CORRECTION: TensorName(
            "block_sparse_moe.e_score_correction_bias", bare=True, also="mlp.e_score_correction_bias"
        ),
    },
)
