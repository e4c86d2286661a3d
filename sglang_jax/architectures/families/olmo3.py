"""OLMo 3 (2025): OLMo 2 with windows in three of four layers, which may have a different rope."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.hf_rope import rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import POST_NORM_NAMES

_NAME = "olmo3"
_DEFAULTS = Defaults(max_position=2048, eps=1e-5, theta=5e5, eos_token_id=50279)


def configure(fields: JsonFields) -> ModelConfig:
    whole_rope, sliding_rope = _ropes(fields)
    common = CommonFields.read(fields, _DEFAULTS, rope=whole_rope)
    norm = replace(common.norm(), weight_in_float32=True)
    norms = SublayerNorms(post=norm)
    bias = fields.boolean("attention_bias") or False
    whole = replace(common.attention(), qk_norm=QKNorm(norm=norm, whole=True), bias=bias, out_bias=bias)
    sliding = replace(whole, rope=sliding_rope, window=common.effective_window(fields.count_or("sliding_window", 4096)))
    layers = [
        LayerConfig(
            mixer=sliding if slides else whole,
            feed_forward=common.feed_forward(),
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for slides in common.sliding_layers(every=4)
    ]
    return common.model(_NAME, layers, norm)


def _ropes(fields: JsonFields) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of layers with full attention and with a window. If the file has only one set of parameters, its
    scaling applies to full attention."""
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    parameters = fields.nested("rope_parameters")
    if parameters is None or not {"full_attention", "sliding_attention"} & parameters.values.keys():
        whole = rope_from_hf(fields, context, _DEFAULTS.theta)
        return whole, RopeConfig(theta=fields.number("rope_local_base_freq") or whole.theta)
    kinds = (parameters.nested("full_attention"), parameters.nested("sliding_attention"))
    nothing = JsonFields({}, fields.file)
    whole, sliding = (rope_from_hf(nothing, context, _DEFAULTS.theta, kind or nothing) for kind in kinds)
    return whole, sliding


_GGUF_FIELDS = {"sliding_window": "attention.sliding_window", "rope_local_base_freq": "rope.freq_base_swa"}

FAMILY = Family(
    name=_NAME,
    class_name="Olmo3ForCausalLM",
    configure=configure,
    names=POST_NORM_NAMES,
    gguf=GgufForm(name="olmo2", fields=_GGUF_FIELDS, windowed=True),
)
