"""GGUF metadata → `ModelConfig`, and the sampling values that a file recommends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import dequantize
from numpy.typing import NDArray

from sglang_jax.architectures.hf_rope import rope_to_hf
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm, known_families
from sglang_jax.architectures.tensor_names import ParameterKind, Part, gguf_name
from sglang_jax.checkpoint.gguf_end_tokens import gguf_end_token_ids
from sglang_jax.checkpoint.gguf_file import GgufFile, Value
from sglang_jax.checkpoint.gguf_reader import ROPE_FACTORS
from sglang_jax.errors import CheckpointError
from sglang_jax.sampling import GenerationDefaults

_EXPERTS = "expert_count"
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""Constants of all Llama 3.1 to 3.3 checkpoints; GGUF files store the divisors that follow from them."""


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Reads the config of a GGUF file: translates its metadata to fields of config.json, which its family reads. Raises
    `CheckpointError` naming the key, its value and what is supported."""
    family, form = gguf_family(file)
    name = form.name
    _refuse_unsupported(file, form)
    values = _common_values(file, family, name)
    if form.experts:
        values["num_experts"] = file.require(f"{name}.{_EXPERTS}", int)
        values["num_experts_per_tok"] = file.require(f"{name}.expert_used_count", int)
    values |= form.derive(values)
    for field, key in form.fields.items():
        value = file.metadata.get(f"{name}.{key}")
        if value is not None:
            values[field] = _rounded(value) if isinstance(value, float) else value
    values |= _windows(file, name, values.get("sliding_window"))
    config = family.configure(JsonFields(values, file.path))

    layers = [_with_biases(layer, number, family, file) for number, layer in enumerate(config.layers)]
    if not form.norms_hold_offset:
        return replace(config, layers=tuple(layers))
    final_norm = replace(config.final_norm, offset=0.0)
    return replace(config, layers=tuple(map(_without_offsets, layers)), final_norm=final_norm)


def gguf_family(file: GgufFile) -> tuple[Family, GgufForm]:
    name = file.require("general.architecture", str)
    windowed = bool(file.metadata.get(f"{name}.{_WINDOW}"))
    known = [(family, family.gguf) for family in known_families() if family.gguf is not None]
    found = [(family, form) for family, form in known if form.name == name and (windowed or not form.windowed)]
    if not found:
        names = ", ".join(dict.fromkeys(form.name for _, form in known))
        raise CheckpointError(f"{file.path}: architecture {name!r} is not supported; supported: {names}")
    experts = bool(file.metadata.get(f"{name}.{_EXPERTS}"))
    return max(found, key=lambda each: (each[1].experts is experts, each[1].windowed))


def _common_values(file: GgufFile, family: Family, name: str) -> dict[str, Any]:
    hidden = file.require(f"{name}.embedding_length", int)
    heads = _uniform(file, f"{name}.attention.head_count")
    head_dim = file.get(f"{name}.attention.key_length", int) or hidden // heads
    return {
        "model_type": name,
        "vocab_size": _vocab_size(file, family),
        "hidden_size": hidden,
        "intermediate_size": _uniform(file, f"{name}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{name}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(file, f"{name}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        **_epsilon(file, name),
        "rope_parameters": rope_to_hf(_rope(file, name, head_dim)),
        "max_position_embeddings": file.require(f"{name}.context_length", int),
        "tie_word_embeddings": _tensor(family, Part.HEAD, ParameterKind.WEIGHT) not in file.tensors,
        "eos_token_id": list(gguf_end_token_ids(file)),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "dtype": "bfloat16",
    }


def _tensor(family: Family, part: Part, kind: ParameterKind, layer: int | None = None) -> str | None:
    return gguf_name(family.names[part], kind, layer)


def _epsilon(file: GgufFile, name: str) -> dict[str, float]:
    keys = {"rms_norm_eps": "layer_norm_rms_epsilon", "layer_norm_eps": "layer_norm_epsilon"}
    found = {field: file.get(f"{name}.attention.{key}", float) for field, key in keys.items()}
    if set(found.values()) == {None}:
        raise CheckpointError(f"{file.path}: metadata {name}.attention.layer_norm_rms_epsilon is missing")
    return {field: _rounded(value) for field, value in found.items() if value is not None}


def _windows(file: GgufFile, name: str, window: object) -> dict[str, Any]:
    """The attention window (0 in the file means none), and which layers have it, if the file says so."""
    values: dict[str, Any] = {"sliding_window": window or None}
    pattern = file.metadata.get(f"{name}.{_PATTERN}")
    if isinstance(pattern, list):
        values["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif pattern is not None:
        values["sliding_window_pattern"] = pattern
    return values


def _with_biases(layer: LayerConfig, number: int, family: Family, file: GgufFile) -> LayerConfig:

    def has(part: Part) -> bool:
        return _tensor(family, part, ParameterKind.BIAS, number) in file.tensors

    assert layer.attention is not None, "no family with other layers has a form of GGUF files"
    assert layer.feed_forward is not None
    return replace(
        layer,
        mixer=replace(layer.attention, bias=has(Part.QUERY), out_bias=has(Part.OUTPUT)),
        feed_forward=layer.feed_forward.with_biases(has),
    )


def _without_offsets(layer: LayerConfig) -> LayerConfig:
    """GGUF norm weights already include the offset."""

    def plain(norms: SublayerNorms) -> SublayerNorms:
        pre, post = (None if norm is None else replace(norm, offset=0.0) for norm in (norms.pre, norms.post))
        return SublayerNorms(pre=pre, post=post)

    attention = layer.kv_attention
    assert attention is not None, "no family with other layers has a form of GGUF files"
    qk_norm = attention.qk_norm
    if qk_norm is not None:
        attention = replace(attention, qk_norm=replace(qk_norm, norm=replace(qk_norm.norm, offset=0.0)))
    return replace(
        layer,
        mixer=attention,
        mixer_norms=plain(layer.mixer_norms),
        feed_forward_norms=plain(layer.feed_forward_norms),
    )


def _refuse_unsupported(file: GgufFile, form: GgufForm) -> None:
    name = form.name
    experts = file.get(f"{name}.{_EXPERTS}", int)
    if experts and not form.experts:
        raise CheckpointError(
            f"{file.path}: {name} models with mixtures of experts ({experts} experts) are not supported; use a dense "
            "model"
        )
    window = file.get(f"{name}.{_WINDOW}", int)
    context = file.require(f"{name}.context_length", int)
    if window and window < context and "sliding_window" not in form.fields:
        raise CheckpointError(
            f"{file.path}: attention in a sliding window of {window} tokens (context {context}) is not supported in "
            f"{name} models"
        )


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """An integer that may also be stored as a list with an equal value for each layer."""
    value: Value | None = file.metadata.get(key, default)
    match value:
        case None:
            raise CheckpointError(f"{file.path}: metadata {key} is missing")
        case int():
            return value
        case [int(first), *rest] if all(other == first for other in rest):
            return first
    raise CheckpointError(f"{file.path}: {key} is {value!r:.80}; it must be one integer for all layers")


def _vocab_size(file: GgufFile, family: Family) -> int:
    name = _tensor(family, Part.EMBEDDING, ParameterKind.WEIGHT)
    embedding = None if name is None else file.tensors.get(name)
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor {name} is missing")
    return embedding.shape[0]


def _rounded(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, name: str, head_dim: int) -> RopeConfig:
    rotated = file.get(f"{name}.rope.dimension_count", int)
    if rotated is not None and rotated != head_dim:
        raise CheckpointError(
            f"{file.path}: {name}.rope.dimension_count is {rotated}; only whole heads ({head_dim}) can be rotated"
        )
    theta = _rounded(file.get(f"{name}.rope.freq_base", float) or 10000.0)
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind = file.get(f"{name}.rope.scaling.type", str)
    factor = file.get(f"{name}.rope.scaling.factor", float) or file.get(f"{name}.rope.scale_linear", float)
    if kind in (None, "none", "linear") and factor is not None and factor not in (0.0, 1.0) and kind != "none":
        return RopeConfig(kind=RopeKind.LINEAR, theta=theta, factor=_rounded(factor))
    if kind in (None, "none", "linear"):
        return RopeConfig(theta=theta)
    if kind == "yarn":
        return _yarn_rope(file, name, theta, factor)
    raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")


def _yarn_rope(file: GgufFile, name: str, theta: float, factor: float | None) -> RopeConfig:
    """YaRN (Peng et al. 2023), with the attention factor that the file may have."""
    if not factor:
        raise CheckpointError(f"{file.path}: metadata {name}.rope.scaling.factor is missing")
    scale = file.get(f"{name}.rope.scaling.attn_factor", float) or 1.0
    context = file.require(f"{name}.context_length", int)
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=_rounded(factor),
        original_max_position=file.get(f"{name}.rope.scaling.original_context_length", int) or context,
        beta_fast=file.get(f"{name}.rope.scaling.yarn_beta_fast", float) or 32.0,
        beta_slow=file.get(f"{name}.rope.scaling.yarn_beta_slow", float) or 1.0,
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
    )


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Finds the llama3 parameters from the stored frequency divisors: the largest is the factor, and the others must
    agree with Llama 3's constants."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind is None or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} has shape {tensor.shape}; heads of {head_dim} need {head_dim // 2} values"
        )
    stored: NDArray[np.float32] = dequantize(file.raw(tensor), tensor.kind).reshape(-1)
    rope = RopeConfig(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=round(float(stored.max()), 4),
        original_max_position=_LLAMA3_ORIGINAL,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
    )
    if not np.allclose(stored, llama3_divisors(rope, head_dim), rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} does not hold the frequency scaling of Llama 3 (low 1, high 4, original "
            f"context 8192), the only one supported in a GGUF file; it holds {stored.tolist()}"
        )
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Divisors of the rotary frequencies under llama3 scaling, `[head_dim // 2]`, as in Llama 3.1's reference code."""
    if rope.original_max_position is None:
        raise ValueError("llama3 scaling needs original_max_position")
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    share = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / rope.factor + share)


def gguf_generation_defaults(file: GgufFile) -> GenerationDefaults:
    """The file's `general.sampling.*`. The repetition penalty is left out, because GGUF's covers only the last
    `penalty_last_n` tokens. Raises `CheckpointError` for a value of a wrong type."""
    top_k = file.get("general.sampling.top_k", int)
    return GenerationDefaults(
        temperature=_number(file, "temp"),
        top_p=_number(file, "top_p"),
        top_k=-1 if top_k is not None and top_k <= 0 else top_k,  # in GGUF, 0 keeps all tokens
        min_p=_number(file, "min_p"),
    )


def _number(file: GgufFile, name: str) -> float | None:
    """Rounds to 7 digits: the file stores 0.9 as a float32."""
    value = file.get(f"general.sampling.{name}", float)
    return None if value is None else float(f"{value:.7g}")
