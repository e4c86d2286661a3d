"""The Torch backend: Triton kernels and CUDA graphs on CUDA, torch and compiled kernels on a CPU. Importing it imports
no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sglang_jax.errors import ConfigError, how_to_install
from torch_backend.openmp import spin_shortly

if TYPE_CHECKING:
    from sglang_jax.checkpoint.opening import Checkpoint
    from sglang_jax.config import EngineConfig
    from sglang_jax.runner.protocol import Runner


def create_runner(config: EngineConfig, checkpoint: Checkpoint) -> Runner:
    """Returns a runner with the checkpoint's weights on the device; the entry point of the backend `torch`. Raises
    `ConfigError` for options that this machine does not support, `CheckpointError` for weights that do not fit."""
    if find_spec("torch") is None:
        raise ConfigError(f"the Torch backend needs torch: {how_to_install('cuda')}, or '.[torch]' on a CPU")
    if config.nnodes > 1:
        raise ConfigError(f"the Torch backend runs on one node, nnodes must be 1, got {config.nnodes}")
    spin_shortly()
    if config.tp_size > 1:
        from torch_backend.followers import launch_group

        return launch_group(config, checkpoint)
    from torch_backend.loading import load_rank

    return load_rank(config, checkpoint)
