"""Finds the backend that runs the model. It is imported only once it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.protocol import Runner

BackendFactory = Callable[[EngineConfig, Checkpoint], Runner]
"""Makes a runner with the checkpoint's weights on the device. Raises `ConfigError`, `CheckpointError`."""

ENTRY_POINT_GROUP = "sglang_jax.backends"

_PREFERENCE = (Backend.JAX,)
"""What `auto` takes: the first that is installed."""


def load_backend(config: EngineConfig) -> BackendFactory:
    """The factory of the backend that `config.backend` names.

    **Raises:** `ConfigError` if it is not installed, naming those that are.
    """
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return cast(BackendFactory, _choose(config.backend, installed).load())


def _choose(wanted: Backend, installed: dict[str, EntryPoint]) -> EntryPoint:
    candidates = _PREFERENCE if wanted is Backend.AUTO else (wanted,)
    for backend in candidates:
        if backend.value in installed:
            return installed[backend.value]
    raise ConfigError(
        f"no backend {wanted.value!r} is installed (installed: {', '.join(sorted(installed)) or 'none'}). "
        "Backends come with the package: pip install 'sglang-jax[jax]', or 'sglang-jax[tpu]' on a TPU VM"
    )
