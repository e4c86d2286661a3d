"""Gemma 4 (2026), dense, text only: layers with full attention have larger heads than those with a window, and fewer kv
heads, whose values are their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.gemma_form import GEMMA_NAMES
from sglang_jax.architectures.hf_rope import rope_from_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, Multimodal
from sglang_jax.architectures.tensor_names import Part, TensorName
from sglang_jax.errors import CheckpointError

_NAME = "gemma4_text"
_DEFAULTS = Defaults(
    num_kv_heads=4,
    head_dim=256,
    max_position=131072,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
)
_GLOBAL_HEAD_DIM = 512
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def configure(fields: JsonFields) -> ModelConfig:
    _refuse_unsupported(fields)
    whole_rope, sliding_rope = (_rope(fields, kind) for kind in ("full_attention", "sliding_attention"))
    common = CommonFields.read(fields, _DEFAULTS, rope=whole_rope)
    norm = replace(common.norm(), weight_in_float32=True)
    norms = SublayerNorms(pre=norm, post=norm)
    bias = fields.boolean("attention_bias") or False
    attention = replace(
        common.attention(), scale=1.0, qk_norm=QKNorm(norm=norm), value_norm=norm, bias=bias, out_bias=bias
    )
    window = common.effective_window(fields.count_or("sliding_window", 512))
    sliding = replace(attention, window=window, rope=sliding_rope)
    whole = replace(attention, values_are_keys=fields.boolean("attention_k_eq_v") or False)
    slides = common.sliding_layers(every=6)
    slides[-1] = False
    layers = [
        LayerConfig(
            mixer=_with_layer_heads(common, number, sliding if slides[number] else whole),
            feed_forward=common.feed_forward(field="hidden_activation"),
            mixer_norms=norms,
            feed_forward_norms=norms,
            learnt_scale=True,
        )
        for number in range(common.num_layers)
    ]
    return replace(
        common.model(_NAME, layers, norm),
        embedding_multiplier=common.hidden_size**0.5,
        logit_cap=fields.number("final_logit_softcapping"),
    )


def _with_layer_heads(common: CommonFields, number: int, mixer: AttentionConfig) -> AttentionConfig:
    """`mixer` with its layer's head size and kv heads: from `per_layer_config`, as transformers writes it, or from two
    fields for all layers with full attention."""
    fields = common.fields
    of_layers = fields.nested("per_layer_config")
    whole = mixer.rope == common.rope
    heads = JsonFields({}, fields.file)
    if of_layers is not None:
        heads = of_layers.nested(str(number)) or heads
        unknown = heads.values.keys() - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise CheckpointError(
                f"{fields.file}: per_layer_config of layer {number} has {', '.join(sorted(unknown))}; "
                "head_dim and num_key_value_heads are supported"
            )
    elif whole:
        size = fields.count_or("global_head_dim", _GLOBAL_HEAD_DIM)
        kv_heads = fields.count("num_global_key_value_heads") if mixer.values_are_keys else None
        heads = JsonFields({"head_dim": size, "num_key_value_heads": kv_heads}, fields.file)
    head_dim = heads.count("head_dim") or mixer.head_dim
    kv_heads = heads.count("num_key_value_heads") or mixer.num_kv_heads
    common.check_heads(mixer.num_heads, kv_heads, head_dim)
    return replace(mixer, head_dim=head_dim, num_kv_heads=kv_heads)


def _rope(fields: JsonFields, kind: str) -> RopeConfig:
    context = fields.size("max_position_embeddings", _DEFAULTS.max_position)
    parameters = fields.nested("rope_parameters")
    own = None if parameters is None else parameters.nested(kind)
    nothing = JsonFields({}, fields.file)
    return rope_from_hf(nothing, context, scaling=own or JsonFields(dict(_ROPES[kind]), fields.file))


_UNSUPPORTED: Mapping[str, str] = {
    "enable_moe_block": "experts",
    "num_kv_shared_layers": "layers that read the keys and values of others",
}


def _refuse_unsupported(fields: JsonFields) -> None:
    for field, what in _UNSUPPORTED.items():
        if fields.value(field):
            raise CheckpointError(f"{fields.file}: {field} is {fields.value(field)}: {what} are not supported")
    size = fields.count_or("hidden_size_per_layer_input", 256)
    if size:
        raise CheckpointError(
            f"{fields.file}: hidden_size_per_layer_input is {size} (default 256), but per-layer embeddings are not "
            "supported; use a model without them (0)"
        )
    for harmless in ("use_double_wide_mlp", "vocab_size_per_layer_input"):  # options of features that are refused above
        fields.value(harmless)
    if fields.value("use_bidirectional_attention") == "all":
        raise CheckpointError(
            f"{fields.file}: use_bidirectional_attention is 'all', which is not supported: attention here is causal"
        )


FAMILY = Family(
    name=_NAME,
    class_name="Gemma4ForCausalLM",
    configure=configure,
    names={**GEMMA_NAMES, Part.LAYER_SCALE: TensorName("layer_scalar", "layer_output_scale", bare=True)},
    multimodal=Multimodal(class_name="Gemma4ForConditionalGeneration"),
)
