"""ERNIE 4.5 with experts (2025): adjacent rotary pairs, experts chosen by corrected softmax scores, and shared ones."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.deepseek_experts_form import DEEPSEEK_EXPERTS_NAMES
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import Part, TensorName
from sglang_jax.errors import CheckpointError

_NAME = "ernie4_5_moe"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    max_position=131072,
    eps=1e-5,
    theta=5e5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
_MOST_ADDED = 1e-6
"""Maximum of `moe_norm_min`, a minimum for the sum of scores: sums of softmax scores exceed it."""


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    if fields.boolean("use_bias"):
        raise CheckpointError(f"{fields.file}: use_bias is true; only false is supported, experts have no biases")
    attention = replace(common.attention(), interleaved_rope=True)
    dense, experts = common.feed_forward(), _experts(common)
    layers = [
        common.pre_norm_layer(attention, experts if has_experts else dense) for has_experts in _sparse_layers(common)
    ]
    return common.model(_NAME, layers)


def _experts(common: CommonFields) -> ExpertsConfig:
    fields = common.fields
    experts = read_experts(
        common,
        num_experts=64,
        chosen=6,
        size="moe_intermediate_size",
        default_size=1536,
        counts=("moe_num_experts", "num_experts"),
        of_token="moe_k",
    )
    least = fields.number("moe_norm_min")
    if least is not None and least > _MOST_ADDED:
        raise CheckpointError(f"{fields.file}: moe_norm_min is {least:g}, it must be at most {_MOST_ADDED:g}")
    shared = fields.count_or("moe_num_shared_experts", 2) or 0
    return replace(experts, correction=True, renormalised=True, shared_size=shared * experts.size)


def _sparse_layers(common: CommonFields) -> list[bool]:
    """Whether each layer has experts: every `moe_layer_interval`-th of those from `moe_layer_start_index` to
    `moe_layer_end_index` (-1: the last layer)."""
    fields = common.fields
    first, last = fields.integer("moe_layer_start_index"), fields.integer("moe_layer_end_index")
    first = 1 if first is None else first
    last = common.num_layers - 1 if last in (None, -1) else last
    every = fields.size("moe_layer_interval", 1)
    return [(number + 1) % every == 0 and first <= number <= last for number in range(common.num_layers)]


FAMILY = Family(
    name=_NAME,
    class_name="Ernie4_5_MoeForCausalLM",
    configure=configure,
    names={
        **DEEPSEEK_EXPERTS_NAMES,
        Part.ROUTER_CORRECTION: TensorName(
            "mlp.moe_statics.e_score_correction_bias",
            bare=True,
            as_row=True,
            also="mlp.gate.moe_statics.e_score_correction_bias",
        ),
    },
)
