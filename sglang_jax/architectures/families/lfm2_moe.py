"""LFM2 with experts (Liquid AI, 2025): LFM2 whose feed-forward parts, except the first, are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.lfm2_form import LFM2_DEFAULTS, LFM2_NAMES, lfm2_model
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import EXPERT, Part, Stacked, TensorName

_NAME = "lfm2_moe"


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, LFM2_DEFAULTS)
    experts, dense = _experts(common), common.feed_forward()
    first = fields.count_or("num_dense_layers", 2) or 0
    parts = [dense if number < first else experts for number in range(common.num_layers)]
    return lfm2_model(_NAME, common, parts)


def _experts(common: CommonFields) -> ExpertsConfig:
    fields = common.fields
    experts = read_experts(common, num_experts=32, chosen=4, size="moe_intermediate_size", default_size=1792)
    return replace(
        experts,
        scores=ExpertScores.SIGMOID,
        correction=fields.boolean("use_expert_bias") is not False,
        renormalised=fields.boolean("norm_topk_prob") is not False,
        added_to_sum=1e-6,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )


_EACH = f"feed_forward.experts.{EXPERT}"
_GATE_UP, _DOWN = Stacked("feed_forward.experts.gate_up_proj"), Stacked("feed_forward.experts.down_proj")

FAMILY = Family(
    name=_NAME,
    class_name="Lfm2MoeForCausalLM",
    configure=configure,
    names={
        **LFM2_NAMES,
        Part.ROUTER: TensorName("feed_forward.gate"),
        Part.ROUTER_CORRECTION: TensorName("feed_forward.expert_bias", bare=True),
        Part.EXPERT_GATE: TensorName(f"{_EACH}.w1", stacked=(_GATE_UP,)),
        Part.EXPERT_UP: TensorName(f"{_EACH}.w3", stacked=(_GATE_UP,)),
        Part.EXPERT_DOWN: TensorName(f"{_EACH}.w2", stacked=(_DOWN,)),
    },
)
