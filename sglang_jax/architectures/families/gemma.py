"""Gemma (2024), also CodeGemma: Llama's layers with norms that multiply by 1 + w, scaled embeddings, and GELU."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.gemma_form import gemma_model, gemma_norm
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.feed_forward import Activation, FeedForwardConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm

_NAME = "gemma"
_DEFAULTS = Defaults(
    num_kv_heads=16,
    head_dim=256,
    max_position=8192,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    norms = SublayerNorms(pre=gemma_norm(common))
    bias = fields.boolean("attention_bias") or False
    layer = LayerConfig(
        mixer=replace(common.attention(), bias=bias, out_bias=bias),
        feed_forward=_feed_forward(common),
        mixer_norms=norms,
        feed_forward_norms=norms,
    )
    return gemma_model(common, _NAME, [layer] * common.num_layers, logit_cap=None)


def _feed_forward(common: CommonFields) -> FeedForwardConfig:
    """The first files say `gelu` but mean its tanh approximation."""
    if common.fields.string("hidden_act") != "gelu":
        return common.feed_forward()
    return FeedForwardConfig(size=common.fields.required_integer("intermediate_size"), activation=Activation.GELU_TANH)


FAMILY = Family(
    name=_NAME,
    class_name="GemmaForCausalLM",
    configure=configure,
    gguf=GgufForm(name="gemma", norms_hold_offset=True),
)
