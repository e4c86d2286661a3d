"""Which models and options have results that do not depend on the batch (`enable_deterministic_inference`)."""

from __future__ import annotations

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import EngineConfig, MambaDtype, ModelImpl
from sglang_jax.errors import ConfigError


def refuse_with_determinism(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for what cannot have the same results in every step, on any device."""
    if not config.enable_deterministic_inference:
        return
    if config.model_impl is ModelImpl.TRANSFORMERS:
        raise ConfigError(
            "enable_deterministic_inference does not support model_impl transformers, whose products may depend on the "
            "batch: choose native"
        )
    if model.keeps_states and config.mamba_ssm_dtype is not MambaDtype.FLOAT32:
        raise ConfigError(
            f"enable_deterministic_inference needs mamba_ssm_dtype float32, got {config.mamba_ssm_dtype.value}, which "
            "rounds states at the end of each chunk"
        )
