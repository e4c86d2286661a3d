"""What Gemma 2 and 3 have in common: norms that multiply by 1 + w, scaled embeddings, names of norms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, NormConfig
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError

GEMMA_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ATTENTION_POST_NORM: TensorName("post_attention_layernorm", "post_attention_norm"),
    Part.FEED_FORWARD_NORM: TensorName("pre_feedforward_layernorm", "ffn_norm"),
    Part.FEED_FORWARD_POST_NORM: TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}


def gemma_norm(common: CommonFields) -> NormConfig:
    """Multiplies by 1 + w in float32."""
    return replace(common.norm(), wide=True, offset=1.0)


def gemma_model(
    common: CommonFields, name: str, layers: Iterable[LayerConfig], *, logit_cap: float | None
) -> ModelConfig:
    """The model of these layers, with embeddings times the root of the hidden size.

    **Raises:** `CheckpointError` for one whose tokens see those after them.
    """
    fields = common.fields
    if fields.boolean("use_bidirectional_attention"):
        raise CheckpointError(f"{fields.file}: use_bidirectional_attention is not supported: attention here is causal")
    return replace(
        common.model(name, layers, gemma_norm(common)),
        embedding_multiplier=common.hidden_size**0.5,
        logit_cap=logit_cap,
    )
