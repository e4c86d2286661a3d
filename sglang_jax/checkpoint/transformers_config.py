"""Config of a model that transformers runs (`--model-impl transformers`): only what the engine needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.checkpoint.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE, load_quantization
from sglang_jax.errors import CheckpointError, cut

_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_transformers_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """Returns the values of a folder's config.json, and a `ModelConfig` whose layers describe only attention: heads and
    window. Raises `CheckpointError` if transformers cannot read the file, or some layers are not attention."""
    file = folder / CONFIG_FILE
    given = JsonFields.read(file)
    quantization = load_quantization(folder)
    if quantization is not None:
        raise CheckpointError(
            f"{quantization.file}: quantised weights are not supported with model_impl transformers; give a checkpoint "
            "in bfloat16, float16 or float32, or a family that runs without it"
        )
    fields = JsonFields(_normalised(given), file)
    generation = folder / GENERATION_CONFIG_FILE
    ends = list(fields.integers("eos_token_id"))
    if generation.is_file():
        ends += JsonFields.read(generation).integers("eos_token_id")
    return given.values, transformers_model_config(fields, tuple(dict.fromkeys(ends)), _dtype(given))


def _normalised(given: JsonFields) -> dict[str, Any]:
    """All values of transformers' config, with defaults, under the common names."""
    # Imported here: the first is slow, and the second imports torch if it is installed.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    values = dict(given.values)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise CheckpointError(f"{given.file}: model_type is missing; transformers needs it to identify the model")
    try:
        config = AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise CheckpointError(f"{given.file}: transformers cannot read it: {_in_a_line(error)}") from error
    return under_usual_names(config.to_dict(), config.attribute_map)


def under_usual_names(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Adds common names for values that a config has under its own names. `names`: common to own."""
    return {**{usual: values.get(own) for usual, own in names.items()}, **values}


def _in_a_line(error: Exception) -> str:
    return cut(" ".join(str(error).split()))


def _dtype(given: JsonFields) -> str:
    return given.string("dtype") or given.string("torch_dtype") or "float32"


def transformers_model_config(fields: JsonFields, ends: tuple[int, ...], dtype: str) -> ModelConfig:
    """See `load_transformers_config`; `fields` have the common names."""
    hidden, heads = fields.required_integer("hidden_size"), fields.required_integer("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if not fields.count("head_dim") and hidden % heads:
        raise CheckpointError(
            f"{fields.file}: head_dim is missing, and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    head_dim = fields.count("head_dim") or hidden // heads
    if head_dim % 2:
        raise CheckpointError(f"{fields.file}: head_dim is {head_dim}, it must be even")
    context = fields.required_integer("max_position_embeddings")
    window = fields.count("sliding_window")
    count = fields.required_integer("num_hidden_layers", MAX_LAYERS)

    def layer(sees: int | None) -> LayerConfig:
        attention = AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=None,
            window=None if sees is None or sees >= context else sees,
        )
        return LayerConfig(
            mixer=attention, feed_forward=None, mixer_norms=SublayerNorms(), feed_forward_norms=SublayerNorms()
        )

    return ModelConfig(
        architecture=fields.string("model_type") or "",
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layer(window if kind == _SLIDING else None) for kind in _kinds(fields, count, window)),
        final_norm=NormConfig(eps=0.0),
        max_position=context,
        tie_word_embeddings=fields.boolean("tie_word_embeddings") or False,
        eos_token_ids=ends,
        bos_token_id=fields.integer("bos_token_id"),
        dtype=dtype,
    )


def _kinds(fields: JsonFields, count: int, window: int | None) -> tuple[str, ...]:
    """`layer_types`, or the same type for all layers if the field is missing."""
    kinds = fields.strings("layer_types") or (_FULL if window is None else _SLIDING,) * count
    other = sorted(set(kinds) - {_FULL, _SLIDING})
    if other or len(kinds) != count:
        seen = ", ".join(other) or f"{len(kinds)} entries for {count} layers"
        raise CheckpointError(
            f"{fields.file}: layer_types has {cut(seen)}; model_impl transformers serves {_FULL} and {_SLIDING}"
        )
    return kinds
