"""The JAX backend. Importing it does not import JAX; `create_runner` does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sglang_jax.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from sglang_jax.checkpoint.opening import Checkpoint
    from sglang_jax.config import EngineConfig
    from sglang_jax.runner.protocol import Runner


def create_runner(config: EngineConfig, checkpoint: Checkpoint) -> Runner:
    """A runner with the checkpoint's weights on the device; the entry point of the backend `jax`. Raises `ConfigError`
    for options that this machine does not support, and `CheckpointError` for weights that do not fit the model."""
    _check_installed()
    if config.nnodes > 1:
        from sglang_jax.jax_runner.nodes import launch_nodes

        return launch_nodes(config, checkpoint)
    from sglang_jax.jax_runner.loading import load_rank

    return load_rank(config, checkpoint)


def follow(config: EngineConfig) -> None:
    """Runs the plans of node 0 until that ends, on a node with a `config.node_rank` above 0. Raises as
    `create_runner`."""
    _check_installed()
    from sglang_jax.jax_runner.nodes import follow_node

    follow_node(config)


def _check_installed() -> None:
    missing = [name for name in ("jax", "flax") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the JAX backend needs {' and '.join(missing)}: {how_to_install('jax')}")
