"""Finds the backend that runs the model, and imports only that one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import cast

from sglang_jax.about import BACKENDS
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import Backend, Device, EngineConfig, ModelImpl
from sglang_jax.errors import ConfigError, how_to_install
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.this_machine import has_cuda_gpu, has_tpu

logger = logging.getLogger(__name__)

BackendFactory = Callable[[EngineConfig, Checkpoint], Runner]
"""Creates a runner with the checkpoint's weights on the device. Raises `ConfigError`, `CheckpointError`."""

Follow = Callable[[EngineConfig], None]
"""Runs the plans of node 0 until that ends. Raises `ConfigError`, `CheckpointError`."""

FOLLOWER_GROUP = "sglang_jax.followers"
"""Entry points of backends that support several nodes."""

_FRAMEWORK = {Backend.JAX: "jax", Backend.TORCH: "torch"}


def load_backend(config: EngineConfig) -> BackendFactory:
    """The factory of the backend that `config.backend` names. `auto` is jax on a machine with a TPU, torch on one with
    a CUDA GPU, and otherwise the installed one, jax first; a device that the options name counts as present. Raises
    `ConfigError` if it is not installed."""
    return cast(BackendFactory, _find(config).load())


def load_follower(config: EngineConfig) -> Follow:
    """The function that nodes with a `config.node_rank` above 0 run, of the same backend. Raises `ConfigError` if that
    does not support several nodes, or is not installed."""
    name = _find(config).name
    followers = {entry.name: entry for entry in entry_points(group=FOLLOWER_GROUP)}
    if name not in followers:
        raise ConfigError(f"the backend {name} runs on one node, nnodes must be 1, got {config.nnodes}")
    return cast(Follow, followers[name].load())


def _find(config: EngineConfig) -> EntryPoint:
    entries = {entry.name: entry for entry in entry_points(group=BACKENDS)}
    backend = config.backend
    foreign = config.model_impl is ModelImpl.TRANSFORMERS
    if foreign and backend is Backend.JAX:
        raise ConfigError("model_impl transformers needs the Torch backend: choose --backend torch, or a native family")
    if backend is Backend.AUTO:
        backend = Backend.TORCH if foreign else _choose(config.device, entries)
    if backend.value not in entries:
        raise ConfigError(
            f"no backend {backend.value!r} is installed (installed: {', '.join(sorted(entries)) or 'none'}). "
            f"Backends come with the package: {how_to_install(backend.value)}"
        )
    return entries[backend.value]


def _choose(device: Device, entries: Mapping[str, EntryPoint]) -> Backend:
    suited = _suited(device)
    installed = [backend for backend in Backend if backend.value in entries and _has_framework(backend)]
    if suited in installed:
        return suited
    if not installed:
        return suited or Backend.JAX
    if suited is not None:
        logger.warning(
            "This machine's accelerator works best with the %s backend, which is not installed; using %s. "
            "To change that: %s",
            suited.value,
            installed[0].value,
            how_to_install("tpu" if suited is Backend.JAX else "cuda"),
        )
    return installed[0]


def _suited(device: Device) -> Backend | None:
    """The backend for the machine's accelerator; None without one, or if the CPU was chosen."""
    match device:
        case Device.TPU:
            return Backend.JAX
        case Device.CUDA:
            return Backend.TORCH
        case Device.CPU:
            return None
        case Device.AUTO:
            return Backend.JAX if has_tpu() else Backend.TORCH if has_cuda_gpu() else None


def _has_framework(backend: Backend) -> bool:
    return backend in _FRAMEWORK and find_spec(_FRAMEWORK[backend]) is not None
