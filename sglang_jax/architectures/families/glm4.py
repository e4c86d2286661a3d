"""GLM-4 of 2025 (0414): norms before and after each block; half of each head rotates, in adjacent pairs."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_rope import partial_rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName

_NAME = "glm4"
_DEFAULTS = Defaults(num_kv_heads=2, head_dim=128, max_position=131072, eps=1.5625e-7)
_ENDS = (151329, 151336, 151338)
_GATE_UP = TensorName("mlp.gate_up_proj")


def configure(fields: JsonFields) -> ModelConfig:
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    common = CommonFields.read(fields, _DEFAULTS, rope=partial_rope_from_hf(fields, context, _DEFAULTS.theta, 0.5))
    norms = SublayerNorms(pre=common.norm(), post=common.norm())
    bias = fields.boolean("attention_bias")
    layer = LayerConfig(
        mixer=replace(common.attention(), interleaved_rope=True, bias=True if bias is None else bias),
        feed_forward=common.feed_forward(),
        mixer_norms=norms,
        feed_forward_norms=norms,
    )
    model = common.model(_NAME, [layer] * common.num_layers)
    return model if model.eos_token_ids else replace(model, eos_token_ids=_ENDS)


FAMILY = Family(
    name=_NAME,
    class_name="Glm4ForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        Part.ATTENTION_POST_NORM: TensorName("post_self_attn_layernorm"),
        Part.FEED_FORWARD_POST_NORM: TensorName("post_mlp_layernorm"),
        Part.GATE: _GATE_UP,
        Part.UP: _GATE_UP,
    },
)
