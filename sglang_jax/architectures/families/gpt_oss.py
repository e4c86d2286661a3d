"""gpt-oss (2025): experts with a clamped gate and biases; attention with sinks, and windows in every second layer.
Folders have experts in MXFP4, or in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.hf_rope import rope_from_hf, rope_parameters
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ClampedGate, ExpertScores
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, Stacked, TensorName, TensorNames

_NAME = "gpt_oss"
_DEFAULTS = Defaults(num_kv_heads=8, max_position=131072, head_dim=64, eps=1e-5, theta=150000.0)
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""transformers' default if the file has no rotary parameters."""


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS, rope=_rope(fields))
    norm = replace(common.norm(), weight_in_float32=True)
    bias = fields.boolean("attention_bias")
    bias = True if bias is None else bias
    whole = replace(common.attention(), bias=bias, out_bias=bias, sinks=True)
    sliding = replace(whole, window=common.effective_window(fields.count_or("sliding_window", 128)))
    experts = replace(
        read_experts(common, num_experts=128, chosen=4, default_size=2880),
        clamped=_gate(fields),
        scores=ExpertScores.CHOSEN_SOFTMAX,
        router_bias=True,
        bias=True,
    )
    layers = [
        common.pre_norm_layer(sliding if slides else whole, experts, norm) for slides in common.sliding_layers(every=2)
    ]
    return common.model(_NAME, layers, norm)


def _rope(fields: JsonFields) -> RopeConfig:
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    scaling = rope_parameters(fields)
    default = JsonFields(_DEFAULT_ROPE, fields.file)
    return rope_from_hf(fields, context, _DEFAULTS.theta, scaling if scaling.values else default)


def _gate(fields: JsonFields) -> ClampedGate:
    alpha = fields.number("swiglu_alpha")
    return ClampedGate(alpha=1.702 if alpha is None else alpha, limit=fields.positive("swiglu_limit", 7.0))


_GATE_UP = (
    Stacked("mlp.experts.gate_up_proj", transposed=True, alternating=True),
    Stacked("mlp.experts.gate_up_proj_blocks", alternating=True),
)
_DOWN = Stacked("mlp.experts.down_proj", transposed=True), Stacked("mlp.experts.down_proj_blocks")

_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.FEED_FORWARD_NORM: TensorName("post_attention_layernorm", "post_attention_norm"),
    Part.ROUTER: TensorName("mlp.router", "ffn_gate_inp"),
    Part.EXPERT_GATE: TensorName("mlp.experts.gate_up_proj", "ffn_gate_exps", stacked=_GATE_UP),
    Part.EXPERT_UP: TensorName("mlp.experts.gate_up_proj", "ffn_up_exps", stacked=_GATE_UP),
    Part.EXPERT_DOWN: TensorName("mlp.experts.down_proj", "ffn_down_exps", stacked=_DOWN),
}

_GGUF_FIELDS = {
    "intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}


def _untruncated(values: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF files lack the rounding of YaRN's bounds; gpt-oss does not round them."""
    return {"rope_parameters": {**values["rope_parameters"], "truncate": False}}


FAMILY = Family(
    name=_NAME,
    class_name="GptOssForCausalLM",
    configure=configure,
    names=_NAMES,
    gguf=GgufForm(name="gpt-oss", fields=_GGUF_FIELDS, derive=_untruncated, experts=True),
)
