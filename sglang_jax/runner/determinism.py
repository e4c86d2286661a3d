"""Which models and options have results that do not depend on the batch (`enable_deterministic_inference`)."""

from __future__ import annotations

from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.config import Deterministic, EngineConfig, MambaDtype, ModelImpl, TpuActivations
from sglang_jax.errors import ConfigError

SHARDS = (8, 4, 2, 7, 5, 3)
"""Numbers of shards in which a model is computed for results that do not depend on `tp_size`: the first one into which
the model can be divided. Sums over shards are a binary tree. Processes with equal parts of the shards sum subtrees if
the number of shards is a power of two, or if there is one process, or one for each shard."""


def shards_of(config: EngineConfig, model: ModelConfig) -> int | None:
    """The number of shards in which `model` is computed, whatever `tp_size` is; None without `deterministic` tp, and
    for a model that cannot be divided. A draft model is not computed in shards: results do not depend on its guesses.
    Raises `ConfigError` for a `tp_size` that does not divide the number."""
    if config.deterministic is not Deterministic.TP:
        return None
    layers = set(model.layers)
    shards = next((count for count in SHARDS if all(_divides(layer, Parallelism(count)) for layer in layers)), 1)
    if shards == 1 and config.tp_size > 1:
        raise ConfigError(
            "deterministic tp cannot divide this model into parts that are computed separately, got tp_size "
            f"{config.tp_size}: choose tp_size 1, or deterministic batch"
        )
    if shards % config.tp_size:
        raise ConfigError(
            f"deterministic tp computes this model in {shards} shards, got tp_size {config.tp_size}: choose one of "
            + ", ".join(str(size) for size in range(1, shards + 1) if shards % size == 0)
        )
    return None if shards == 1 else shards


def check_divisible(config: EngineConfig, model: ModelConfig, shards: int) -> None:
    """Raises `ConfigError` unless each of `shards` computes its part of every layer without the others."""
    for number, layer in enumerate(model.layers):
        if not _divides(layer, Parallelism(shards, config.expert_parts)):
            raise ConfigError(
                f"{config.determinism_option} does not support tp_size {shards}: layer {number} cannot be "
                "divided into parts that are computed separately"
            )


def _divides(layer: LayerConfig, over: Parallelism) -> bool:
    """Whether each of several shards computes its part of a layer without the others."""
    shards = over.devices
    attention, recurrent = layer.kv_attention, layer.recurrent
    if attention is not None and attention.qk_norm is not None and attention.qk_norm.whole:
        return False
    if isinstance(recurrent, Mamba2Config) and recurrent.norm is not None and recurrent.norm_groups % shards:
        return False
    try:
        layer.sharded(over)
    except ConfigError:
        return False
    return True


def refuse_with_determinism(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for what cannot have the same results in every step, on any device."""
    if not config.batch_invariant:
        return
    if config.model_impl is ModelImpl.TRANSFORMERS:
        raise ConfigError(
            f"{config.determinism_option} does not support model_impl transformers, whose products may depend on the "
            "batch: choose native"
        )
    if config.tpu_activations is TpuActivations.ROUNDED:
        raise ConfigError(
            f"{config.determinism_option} does not support tpu_activations rounded, which depends on the tokens of a "
            "step: choose auto"
        )
    if model.keeps_states and config.mamba_ssm_dtype is not MambaDtype.FLOAT32:
        raise ConfigError(
            f"{config.determinism_option} needs mamba_ssm_dtype float32, got {config.mamba_ssm_dtype.value}, which "
            "rounds states at the end of each chunk"
        )
