"""Hugging Face `config.json` (and `generation_config.json`) → `ModelConfig`, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_jax.checkpoint.hf_quantization import kv_scales_made_for, refuse_quantised_weights
from sglang_jax.checkpoint.hf_rope import extended_context, rope_from_hf, rope_to_hf
from sglang_jax.checkpoint.json_fields import JsonFields
from sglang_jax.checkpoint.model_config import Architecture, ModelConfig
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError
from sglang_jax.sampling.defaults import GenerationDefaults

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers takes for granted where config.json is silent. `num_kv_heads` 0: as many as heads."""

    architecture: Architecture
    class_name: str
    num_kv_heads: int
    max_position: int
    head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_FAMILIES = (
    _Family(Architecture.LLAMA, "LlamaForCausalLM", 0, 2048, bos_token_id=1, eos_token_id=2),
    _Family(Architecture.MISTRAL, "MistralForCausalLM", 8, 131072, bos_token_id=1, eos_token_id=2),
    _Family(Architecture.QWEN2, "Qwen2ForCausalLM", 32, 32768),
    _Family(Architecture.QWEN3, "Qwen3ForCausalLM", 32, 32768, head_dim=128),
)
_DEFAULT_WINDOW = 4096
"""`sliding_window` of transformers' Mistral and Qwen configs where the file does not give one."""


def load_hf_config(folder: Path) -> ModelConfig:
    """The model that a folder's config.json describes; end-of-sequence ids of generation_config.json join in.

    **Raises:** `CheckpointError` naming the file, the value seen, and what is supported.
    """
    fields = JsonFields.read(folder / CONFIG_FILE)
    return model_config_from_hf(fields, _generation_fields(folder))


def load_kv_scales_made_for(folder: Path) -> KVCacheDtype | None:
    """See `kv_scales_made_for`."""
    return kv_scales_made_for(JsonFields.read(folder / CONFIG_FILE))


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """What generation_config.json recommends; empty where there is no such file."""
    fields = _generation_fields(folder)
    top_k = fields.integer("top_k")
    return GenerationDefaults(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=-1 if top_k == 0 else top_k,  # transformers' way to keep all tokens
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
    )


def _generation_fields(folder: Path) -> JsonFields:
    file = folder / GENERATION_CONFIG_FILE
    return JsonFields.read(file) if file.is_file() else JsonFields({}, file)


def model_config_from_hf(fields: JsonFields, generation: JsonFields) -> ModelConfig:
    """`ModelConfig` of parsed files. Raises `CheckpointError` for what is missing, mistyped or unsupported."""
    family = _family(fields)
    architecture = family.architecture
    _refuse_unsupported(fields)
    heads = fields.required_integer("num_attention_heads")
    hidden = fields.required_integer("hidden_size")
    declared = fields.integer("max_position_embeddings") or family.max_position
    rope = rope_from_hf(fields, declared)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.required_integer("intermediate_size"),
        num_layers=fields.required_integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, family, heads),
        head_dim=_head_dim(fields, family, hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps") or 1e-6,
        rope=rope,
        max_position=max(declared, extended_context(rope)),
        tie_word_embeddings=fields.boolean("tie_word_embeddings") or False,
        attention_bias=_attention_bias(fields, architecture),
        attention_out_bias=_attention_bias(fields, architecture) and architecture is not Architecture.QWEN2,
        mlp_bias=architecture is Architecture.LLAMA and (fields.boolean("mlp_bias") or False),
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_eos_token_ids(fields, generation, family),
        bos_token_id=fields.integer("bos_token_id") if "bos_token_id" in fields.values else family.bos_token_id,
        dtype=fields.string("dtype") or fields.string("torch_dtype") or "float32",
    )
    _check_shape(fields, config)
    _check_window(fields, config)
    return config


def _family(fields: JsonFields) -> _Family:
    supported = ", ".join(family.class_name for family in _FAMILIES)
    match fields.values.get("architectures"):
        case [str(class_name)]:
            found = [family for family in _FAMILIES if family.class_name == class_name]
            seen = class_name
        case None:
            seen = fields.string("model_type") or "(neither architectures nor model_type given)"
            found = [family for family in _FAMILIES if family.architecture == seen]
        case other:
            found, seen = [], repr(other)
    if not found:
        raise CheckpointError(f"{fields.file}: architecture {seen} is not supported; supported: {supported}")
    return found[0]


def _refuse_unsupported(fields: JsonFields) -> None:
    activation = fields.string("hidden_act") or "silu"
    if activation != "silu":
        raise CheckpointError(f"{fields.file}: hidden_act {activation!r} is not supported; supported: silu")
    refuse_quantised_weights(fields)


def _kv_heads(fields: JsonFields, family: _Family, heads: int) -> int:
    if "num_key_value_heads" not in fields.values:
        return family.num_kv_heads or heads
    return fields.integer("num_key_value_heads") or heads


def _head_dim(fields: JsonFields, family: _Family, derived: int) -> int:
    if "head_dim" not in fields.values:
        return family.head_dim or derived
    return fields.integer("head_dim") or derived


def _attention_bias(fields: JsonFields, architecture: Architecture) -> bool:
    match architecture:
        case Architecture.QWEN2:
            return True
        case Architecture.MISTRAL:
            return False
    return fields.boolean("attention_bias") or False


def _eos_token_ids(fields: JsonFields, generation: JsonFields, family: _Family) -> tuple[int, ...]:
    ids = fields.integers("eos_token_id")
    if "eos_token_id" not in fields.values and family.eos_token_id is not None:
        ids = (family.eos_token_id,)
    return tuple(dict.fromkeys((*ids, *generation.integers("eos_token_id"))))


def _check_shape(fields: JsonFields, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{fields.file}: num_attention_heads ({config.num_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{fields.file}: head_dim ({config.head_dim}) must be even for rotary embedding")


def _check_window(fields: JsonFields, config: ModelConfig) -> None:
    """Lets a sliding window pass only where no sequence can outgrow it, as it then changes nothing."""
    window = _window(fields, config)
    if window is not None and window < config.max_position:
        raise CheckpointError(
            f"{fields.file}: sliding_window {window} is below the context of {config.max_position} tokens; "
            "sliding-window attention is not supported by this version"
        )


def _window(fields: JsonFields, config: ModelConfig) -> int | None:
    """Tokens that the sliding layers see, or None where every layer sees all."""
    if config.architecture is Architecture.LLAMA:
        return None
    window = fields.integer("sliding_window") if "sliding_window" in fields.values else _DEFAULT_WINDOW
    if config.architecture is Architecture.MISTRAL or window is None:
        return window
    if not fields.boolean("use_sliding_window"):
        return None
    layer_types = fields.values.get("layer_types")
    if isinstance(layer_types, list):
        return window if "sliding_attention" in layer_types else None
    first_sliding = fields.integer("max_window_layers")
    slides = config.num_layers > (28 if first_sliding is None else first_sliding)
    return window if slides else None


def model_config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json from which `load_hf_config` makes the same `ModelConfig` again."""
    family = next(family for family in _FAMILIES if family.architecture is config.architecture)
    values: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": str(config.architecture),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_to_hf(config.rope),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "use_sliding_window": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
    written = model_config_from_hf(JsonFields(values, Path(CONFIG_FILE)), JsonFields({}, Path(GENERATION_CONFIG_FILE)))
    if written != config:
        raise CheckpointError(f"config.json of {family.class_name} cannot express {config}; it would read {written}")
    return values


def write_hf_config(config: ModelConfig, folder: Path) -> None:
    """Writes config.json into `folder`. Raises `CheckpointError` if Hugging Face's form cannot express `config`."""
    text = json.dumps(model_config_to_hf(config), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
