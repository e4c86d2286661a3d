"""DeepSeek-V2 (2024): latent attention, and experts chosen by softmax from all experts or from the best groups."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.deepseek_experts_form import (
    ExpertDefaults,
    check_choice,
    check_groups,
    layers_with_experts,
    read_deepseek_experts,
)
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.latent_form import DEEPSEEK_NAMES, LatentDefaults, read_attention, read_common
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.errors import CheckpointError

_NAME = "deepseek_v2"
_DEFAULTS = Defaults(max_position=2048, bos_token_id=1, eos_token_id=2)
_LATENT = LatentDefaults()
_EXPERTS = ExpertDefaults(num_experts=64, chosen=0, size=1407, shared=2)
_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS, _LATENT)
    attention = read_attention(common, _LATENT, interleaved=True)
    dense, experts = common.feed_forward(), _experts(common)
    sparse = layers_with_experts(common, default=0)
    layers = [common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in sparse]
    return common.model(_NAME, layers)


def _experts(common: CommonFields) -> ExpertsConfig:
    fields = common.fields
    check_choice(fields, "scoring_func", "softmax")
    if fields.boolean("norm_topk_prob"):
        raise CheckpointError(
            f"{fields.file}: norm_topk_prob true of {_NAME} is not supported: transformers ignores it, and DeepSeek's "
            "own code then leaves out routed_scaling_factor; supported: false"
        )
    experts = read_deepseek_experts(fields, common.num_layers, _EXPERTS)
    experts = replace(experts, activation=common.activation(), best_of_group=1)
    if check_choice(fields, "topk_method", _GREEDY, _GROUPS) == _GREEDY:
        return replace(experts, groups=1, chosen_groups=1)
    check_groups(fields, experts)
    return experts


FAMILY = Family(name=_NAME, class_name="DeepseekV2ForCausalLM", configure=configure, names=DEEPSEEK_NAMES)
