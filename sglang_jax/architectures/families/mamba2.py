"""Mamba-2 (Dao and Gu 2024): recurrent layers without attention or feed-forward parts."""

from __future__ import annotations

from functools import partial

from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.mamba_form import check_mamba, is_set, mamba_names, step_limits
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LABELS_NAME, Part, TensorName, with_model_prefix

_NAME = "mamba2"
_LAYERS = "backbone.layers"
_MAX_POSITIONS = 1 << 20
"""Limit of the context: checkpoints declare none, and a state has the same size for all lengths."""


def configure(fields: JsonFields) -> ModelConfig:
    hidden = fields.required_integer("hidden_size")
    eps = fields.number("layer_norm_epsilon")
    norm = NormConfig(eps=1e-5 if eps is None else eps)
    bias = is_set(fields, "use_bias", default=False)
    groups = fields.size("n_groups", 8)
    mixer = Mamba2Config(
        num_heads=fields.size("num_heads", 128),
        head_dim=fields.size("head_dim", 64),
        state_size=fields.size("state_size", 128),
        num_groups=groups,
        width=fields.size("conv_kernel", 4),
        norm=norm,
        norm_groups=groups,
        bias=bias,
        out_bias=bias,
        conv_bias=is_set(fields, "use_conv_bias", default=True),
        **step_limits(fields),
    )
    check_mamba(fields, mixer, fields.size("expand", 2) * hidden)
    layer = LayerConfig(
        mixer=mixer, feed_forward=None, mixer_norms=SublayerNorms(pre=norm), feed_forward_norms=SublayerNorms()
    )
    return ModelConfig(
        architecture=_NAME,
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * fields.required_integer("num_hidden_layers", MAX_LAYERS),
        final_norm=norm,
        max_position=_MAX_POSITIONS,
        tie_word_embeddings=is_set(fields, "tie_word_embeddings", default=False),
        eos_token_ids=fields.integers("eos_token_id") if "eos_token_id" in fields.values else (2,),
        bos_token_id=fields.integer("bos_token_id") if "bos_token_id" in fields.values else 0,
        dtype=fields.string("dtype") or fields.string("torch_dtype") or "float32",
    )


FAMILY = Family(
    name=_NAME,
    class_name="Mamba2ForCausalLM",
    configure=configure,
    names={
        **mamba_names("mixer", _LAYERS),
        Part.EMBEDDING: TensorName("backbone.embeddings"),
        Part.FINAL_NORM: TensorName("backbone.norm_f"),
        Part.HEAD: TensorName("lm_head"),
        Part.LABELS: LABELS_NAME,
        Part.ATTENTION_NORM: TensorName("norm", layers=_LAYERS),
    },
    without_head=partial(with_model_prefix, prefix="backbone."),
)
