"""Granite 4 (2025), hybrids: Mamba-2 or attention in each layer, with Granite's multipliers. Each layer has a shared
expert, and either no other experts or a mixture of them."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.granite_form import GRANITE_EXPERTS_NAMES, read_granite_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.mamba_form import mamba_names, mamba_of_hybrid
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName
from sglang_jax.errors import CheckpointError, quote

_NAME = "granitemoehybrid"
_DEFAULTS = Defaults(max_position=2048, bos_token_id=1, eos_token_id=2)
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def configure(fields: JsonFields) -> ModelConfig:
    if (kind := fields.string("normalization_function") or "rmsnorm") != "rmsnorm":
        raise CheckpointError(f"{fields.file}: normalization_function is {quote(kind)}; only rmsnorm is supported")
    common = CommonFields.read(fields, _DEFAULTS)
    norm = common.norm()
    mamba = mamba_of_hybrid(fields, common.hidden_size)
    mamba = replace(mamba, norm=norm, norm_groups=mamba.num_groups)
    bias = fields.boolean("attention_bias") or False
    attention = replace(
        common.attention(),
        scale=fields.positive("attention_multiplier", 1.0),
        rope=common.rope if fields.string("position_embedding_type") == "rope" else None,
        bias=bias,
        out_bias=bias,
    )
    feed_forward = _feed_forward(common)
    layers = [
        LayerConfig(
            mixer=mamba if kind in _MAMBA else attention,
            feed_forward=feed_forward,
            mixer_norms=SublayerNorms(pre=norm),
            feed_forward_norms=SublayerNorms(pre=norm),
            residual_multiplier=fields.positive("residual_multiplier", 1.0),
        )
        for kind in common.kinds_of_layers(*_MAMBA, *_ATTENTION) or _MAMBA[:1] * common.num_layers
    ]
    return replace(
        common.model(_NAME, layers),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        logit_multiplier=1 / fields.positive("logits_scaling", 1.0),
    )


def _feed_forward(common: CommonFields) -> FeedForwardConfig | ExpertsConfig:
    """Models without experts have only the shared expert."""
    shared = common.fields.count("shared_intermediate_size")
    shared = 1024 if shared is None else shared
    if not common.fields.count_or("num_local_experts", 8):
        return FeedForwardConfig(size=shared, activation=common.activation())
    return replace(read_granite_experts(common), shared_size=shared)


_GATE_AND_UP, _DOWN = TensorName("shared_mlp.input_linear"), TensorName("shared_mlp.output_linear")

FAMILY = Family(
    name=_NAME,
    class_name="GraniteMoeHybridForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        **GRANITE_EXPERTS_NAMES,
        **mamba_names("mamba"),
        Part.GATE: _GATE_AND_UP,
        Part.UP: _GATE_AND_UP,
        Part.DOWN: _DOWN,
        Part.SHARED_GATE: _GATE_AND_UP,
        Part.SHARED_UP: _GATE_AND_UP,
        Part.SHARED_DOWN: _DOWN,
    },
)
