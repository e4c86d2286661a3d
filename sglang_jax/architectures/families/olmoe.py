"""OLMoE (Muennighoff et al. 2024): a mixture of experts in every layer, and norms over all query heads and over all key
heads."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES
from sglang_jax.errors import CheckpointError

_NAME = "olmoe"
_DEFAULTS = Defaults(max_position=4096, eps=1e-5, eos_token_id=50279)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    if (clip := fields.number("clip_qkv")) is not None:
        raise CheckpointError(f"{fields.file}: clip_qkv is {clip:g}; only null is supported")
    bias = fields.boolean("attention_bias") or False
    qk_norm = QKNorm(norm=common.norm(), whole=True)
    attention = replace(common.attention(), qk_norm=qk_norm, bias=bias, out_bias=bias)
    experts = read_experts(common, num_experts=64, chosen=8)
    experts = replace(experts, renormalised=fields.boolean("norm_topk_prob") or False)
    return common.model(_NAME, [common.pre_norm_layer(attention, experts)] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="OlmoeForCausalLM",
    configure=configure,
    names=EXPERTS_NAMES,
    gguf=GgufForm(name="olmoe", fields={"norm_topk_prob": "expert_weights_norm"}, experts=True),
)
