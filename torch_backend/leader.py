"""Starts a tensor-parallel group with this process as rank 0, whose runner the scheduler uses."""

from __future__ import annotations

from contextlib import ExitStack

from sglang_jax import logs
from sglang_jax.checkpoint import Checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.runner.assembly import open_models
from sglang_jax.runner.group import GroupRunner
from torch_backend.building import refuse_orbax
from torch_backend.devices import select_device
from torch_backend.followers import LocalFollowers
from torch_backend.layers.shard import ModelShard
from torch_backend.loading import load_rank
from torch_backend.process_group import join, leave


class TorchGroupRunner(GroupRunner):
    """A `GroupRunner` that leaves the process group when it is closed."""

    def close(self) -> None:
        try:
            super().close()
        finally:
            leave()


def launch_group(config: EngineConfig, checkpoint: Checkpoint) -> TorchGroupRunner:
    """Returns a runner over `config.tp_size` devices, each with its own process; the first is this one. Raises
    `ConfigError`, `CheckpointError` as for one device, and `RuntimeError` if another process fails."""
    select_device(config.device, config.tp_size - 1)
    _refuse(config, checkpoint)
    followers = LocalFollowers(config, logs.own_level())
    with ExitStack() as undo:
        undo.callback(followers.close)
        followers.wait_ready()
        parallel = join(
            0,
            config.tp_size,
            followers.meeting_point,
            select_device(config.device),
            custom_all_reduce=not config.disable_custom_all_reduce,
        )
        undo.callback(leave)
        followers.on_loss(parallel.abort)
        runner = load_rank(config, checkpoint, parallel)
        undo.pop_all()
    return TorchGroupRunner(runner, followers)


def _refuse(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises `ConfigError` early for options that every rank would refuse, each with a traceback."""
    refuse_orbax(checkpoint)
    for model in open_models(config, checkpoint).all:
        ModelShard.of(model.config, 0, config.tp_size)
