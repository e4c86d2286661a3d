"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import MIXTRAL_NAMES
from sglang_jax.errors import CheckpointError

_NAME = "mixtral"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=4096 * 32, eps=1e-5, theta=1e6, bos_token_id=1, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    if noise := fields.number("router_jitter_noise"):
        raise CheckpointError(f"{fields.file}: router_jitter_noise is {noise:g}; only 0 is supported")
    attention = replace(common.attention(), window=common.effective_window(fields.count("sliding_window")))
    experts = replace(read_experts(common, num_experts=8, chosen=2), renormalised=True)
    return common.model(_NAME, [common.pre_norm_layer(attention, experts)] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="MixtralForCausalLM",
    configure=configure,
    names=MIXTRAL_NAMES,
    gguf=GgufForm(name="llama", interleaved=True, experts=True),
)
