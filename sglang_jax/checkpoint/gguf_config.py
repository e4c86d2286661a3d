"""GGUF metadata → `ModelConfig`."""

from __future__ import annotations

import math

import numpy as np
from gguf import dequantize
from numpy.typing import NDArray

from sglang_jax.checkpoint.gguf_file import GgufFile, Value
from sglang_jax.checkpoint.gguf_reader import ROPE_FACTORS
from sglang_jax.checkpoint.hf_rope import extended_context
from sglang_jax.checkpoint.model_config import Architecture, ModelConfig, RopeConfig, RopeKind
from sglang_jax.errors import CheckpointError

_ARCHITECTURES = {
    "llama": Architecture.LLAMA,
    "qwen2": Architecture.QWEN2,
    "qwen3": Architecture.QWEN3,
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The constants of every Llama 3.1 to 3.3 checkpoint; the files store the factors that follow from them."""


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """The model that a GGUF file describes.

    **Raises:** `CheckpointError` naming the key, its value and what is supported.
    """
    name = file.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[name]
    _refuse_unsupported(file, name)
    hidden = file.require(f"{name}.embedding_length", int)
    heads = _uniform(file, f"{name}.attention.head_count")
    kv_heads = _uniform(file, f"{name}.attention.head_count_kv", default=heads)
    head_dim = file.get(f"{name}.attention.key_length", int) or hidden // heads
    context = file.require(f"{name}.context_length", int)
    rope = _rope(file, name, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=_uniform(file, f"{name}.feed_forward_length"),
        num_layers=file.require(f"{name}.block_count", int),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_rounded(file.require(f"{name}.attention.layer_norm_rms_epsilon", float)),
        rope=rope,
        max_position=max(context, extended_context(rope)),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_end_token_ids(file),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        dtype="bfloat16",
    )


def _refuse_unsupported(file: GgufFile, name: str) -> None:
    experts = file.get(f"{name}.expert_count", int)
    if experts:
        raise CheckpointError(f"{file.path}: a mixture of {experts} experts is not supported; dense models are")
    window = file.get(f"{name}.attention.sliding_window", int)
    context = file.require(f"{name}.context_length", int)
    if window and window < context:
        raise CheckpointError(
            f"{file.path}: attention in a sliding window of {window} tokens (context {context}) is not supported"
        )


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """An integer that may also be stored as one value for each layer, all equal."""
    value: Value | None = file.metadata.get(key, default)
    match value:
        case None:
            raise CheckpointError(f"{file.path}: metadata {key} is missing")
        case int():
            return value
        case [int(first), *rest] if all(other == first for other in rest):
            return first
    raise CheckpointError(f"{file.path}: {key} is {value!r:.80}; one integer for all layers is supported")


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rounded(value: float) -> float:
    """A float32 of the file as the shortest decimal that it stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_token_ids(file: GgufFile) -> tuple[int, ...]:
    ids = [file.get(f"tokenizer.ggml.{key}", int) for key in _END_KEYS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


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
    """YaRN (Peng et al. 2023), with the multiplier of attention that the file may carry."""
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
    """The llama3 parameters behind the stored divisors of the frequencies.

    The largest divisor is the factor; the rest must be what Llama 3's constants give for it.
    """
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
    """What llama3 scaling divides each rotary frequency by: `[head_dim // 2]`, as Llama 3.1's reference code has it."""
    if rope.original_max_position is None:
        raise ValueError("llama3 scaling needs original_max_position")
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    share = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return 1.0 / ((1.0 - share) / rope.factor + share)
