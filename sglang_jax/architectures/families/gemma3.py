"""Gemma 3 (2025), text only: five layers with a window, and a different rope, per layer with full attention."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.gemma_form import GEMMA_NAMES, gemma_gguf, gemma_model, gemma_norm
from sglang_jax.architectures.hf_rope import rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, Multimodal

_NAME = "gemma3_text"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    head_dim=256,
    max_position=131072,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)


def configure(fields: JsonFields) -> ModelConfig:
    whole, sliding = _ropes(fields)
    common = CommonFields.read(fields, _DEFAULTS, rope=whole)
    window = common.effective_window(fields.count_or("sliding_window", 4096))
    bias = fields.boolean("attention_bias") or False
    norms = SublayerNorms(pre=gemma_norm(common), post=gemma_norm(common))
    attention = replace(
        common.attention(),
        scale=(fields.number("query_pre_attn_scalar") or 256) ** -0.5,
        qk_norm=QKNorm(norm=gemma_norm(common)),
        bias=bias,
        out_bias=bias,
    )
    layers = [
        LayerConfig(
            mixer=replace(attention, window=window, rope=sliding) if slides else attention,
            feed_forward=common.feed_forward(field="hidden_activation"),
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for slides in common.sliding_layers(every=fields.size("sliding_window_pattern", 6))
    ]
    return gemma_model(common, _NAME, layers, logit_cap=fields.number("final_logit_softcapping"))


def _ropes(fields: JsonFields) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers with full attention and with a window, from fields of transformers 5 or earlier."""
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    parameters = fields.nested("rope_parameters")
    if parameters is not None and ({"full_attention", "sliding_attention"} & parameters.values.keys()):
        nothing = JsonFields({}, fields.file)
        whole, sliding = (parameters.nested(kind) or nothing for kind in ("full_attention", "sliding_attention"))
        return rope_from_hf(nothing, context, 1e6, whole), rope_from_hf(nothing, context, 10000.0, sliding)
    local = RopeConfig(theta=fields.number("rope_local_base_freq") or 10000.0)
    return rope_from_hf(fields, context, 1e6), local


_DEFAULTS_OF_TEXT = {"vocab_size": 262208, "num_attention_heads": 8}
"""Of transformers' class; published files have only the fields that differ from it."""

FAMILY = Family(
    name=_NAME,
    class_name="Gemma3ForCausalLM",
    configure=configure,
    names=GEMMA_NAMES,
    gguf=gemma_gguf("gemma3", layers_of_27b=62, fields={"rope_local_base_freq": "rope.freq_base_swa"}),
    multimodal=Multimodal(class_name="Gemma3ForConditionalGeneration", defaults=_DEFAULTS_OF_TEXT),
)
