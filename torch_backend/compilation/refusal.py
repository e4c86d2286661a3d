"""The error for models that cannot be served through transformers."""

from __future__ import annotations

from sglang_jax.errors import ConfigError


def refused(model_type: str, reason: str) -> ConfigError:
    return ConfigError(f"model_impl transformers cannot serve {model_type}: {reason}")
