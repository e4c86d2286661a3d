"""Command R7B and Command A (Cohere 2, 2024): attention and feed-forward in parallel after one norm. Layers with a
window rotate; layers with full attention have no positions."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.norm import NormKind
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm

_NAME = "cohere2"
_DEFAULTS = Defaults(max_position=8192, eps=1e-5, tie_word_embeddings=True, bos_token_id=5, eos_token_id=255001)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    norm = replace(common.norm("layer_norm_eps"), kind=NormKind.LAYER, weight_in_float32=True)
    bias = fields.boolean("attention_bias") or False
    window = fields.count_or("sliding_window", 4096)
    attention = replace(common.attention(), rope=None, interleaved_rope=True, bias=bias, out_bias=bias)
    rotated = replace(attention, rope=common.rope, window=common.effective_window(window))
    layers = [
        LayerConfig(
            mixer=rotated if slides and window is not None else attention,
            feed_forward=common.feed_forward(),
            mixer_norms=SublayerNorms(pre=norm),
            feed_forward_norms=SublayerNorms(),
            parallel=True,
        )
        for slides in common.sliding_layers(every=fields.size("sliding_window_pattern", 4))
    ]
    scale = fields.number("logit_scale")
    return replace(common.model(_NAME, layers, norm), logit_multiplier=0.0625 if scale is None else scale)


_GGUF_FIELDS = {"sliding_window": "attention.sliding_window", "logit_scale": "logit_scale"}

FAMILY = Family(
    name=_NAME,
    class_name="Cohere2ForCausalLM",
    configure=configure,
    gguf=GgufForm(name="cohere2", fields=_GGUF_FIELDS),
)
