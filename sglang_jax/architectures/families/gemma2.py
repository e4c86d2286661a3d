"""Gemma 2 (2024): windows in every second layer, soft caps, and norms before and after each block."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.gemma_form import GEMMA_NAMES, gemma_gguf, gemma_model, gemma_norm
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family

_NAME = "gemma2"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    head_dim=256,
    max_position=8192,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    window = common.effective_window(fields.count_or("sliding_window", 4096))
    bias = fields.boolean("attention_bias") or False
    norms = SublayerNorms(pre=gemma_norm(common), post=gemma_norm(common))
    attention = replace(
        common.attention(),
        scale=(fields.number("query_pre_attn_scalar") or 256) ** -0.5,
        soft_cap=fields.number_or("attn_logit_softcapping", 50.0),
        bias=bias,
        out_bias=bias,
    )
    layers = [
        LayerConfig(
            mixer=replace(attention, window=window if slides else None),
            feed_forward=common.feed_forward(field="hidden_activation"),
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for slides in common.sliding_layers(every=2)
    ]
    return gemma_model(common, _NAME, layers, logit_cap=fields.number_or("final_logit_softcapping", 30.0))


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")

FAMILY = Family(
    name=_NAME,
    class_name="Gemma2ForCausalLM",
    configure=configure,
    names=GEMMA_NAMES,
    gguf=gemma_gguf("gemma2", layers_of_27b=46, fields={cap: cap for cap in _CAPS}),
)
