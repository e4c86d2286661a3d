"""Shared by the Gemma families: norms that multiply by 1 + w, scaled embeddings, names of norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig
from sglang_jax.architectures.registry import GgufForm
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError

GEMMA_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ATTENTION_POST_NORM: TensorName("post_attention_layernorm", "post_attention_norm"),
    Part.FEED_FORWARD_NORM: TensorName("pre_feedforward_layernorm", "ffn_norm"),
    Part.FEED_FORWARD_POST_NORM: TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}


def gemma_gguf(name: str, *, layers_of_27b: int, fields: Mapping[str, str]) -> GgufForm:
    """Gemma in GGUF: norm weights include the 1, and the scale of scores is derived from the size of the model."""

    def derive(values: Mapping[str, Any]) -> dict[str, Any]:
        a_head = values["hidden_size"] // values["num_attention_heads"]
        largest = values["num_hidden_layers"] == layers_of_27b
        return {"query_pre_attn_scalar": a_head if largest else values["head_dim"]}

    windowed = {"sliding_window": "attention.sliding_window", **fields}
    return GgufForm(name=name, fields=windowed, derive=derive, norms_hold_offset=True)


def gemma_norm(common: CommonFields) -> NormConfig:
    """The RMS norm, which multiplies by 1 + w in float32."""
    return replace(common.norm(), weight_in_float32=True, offset=1.0)


def gemma_model(
    common: CommonFields, name: str, layers: Iterable[LayerConfig], *, logit_cap: float | None
) -> ModelConfig:
    """A model of these layers, whose embeddings are multiplied by the square root of the hidden size. Raises
    `CheckpointError` for bidirectional attention."""
    fields = common.fields
    if fields.boolean("use_bidirectional_attention"):
        raise CheckpointError(f"{fields.file}: use_bidirectional_attention is not supported: attention here is causal")
    return replace(
        common.model(name, layers, gemma_norm(common)),
        embedding_multiplier=common.hidden_size**0.5,
        logit_cap=logit_cap,
    )
