"""The `torch.distributed` group of the processes that share a model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed

from sglang_jax.errors import ConfigError
from torch_backend.parallel import DistributedTensorParallel


def join(rank: int, size: int, meeting_point: Path, device: torch.device) -> DistributedTensorParallel:
    """Joins the group, once every rank has come.

    **Arguments:** `meeting_point`: a file that does not exist before the first rank comes.

    **Raises:** `ConfigError` if this process belongs to a group already.
    """
    if torch.distributed.is_initialized():
        raise ConfigError(
            "tp_size above 1 needs torch.distributed, which this process uses already: start the engine in "
            "a process of its own"
        )
    share_cores(size, device)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size)
    control = torch.distributed.group.WORLD
    assert control is not None
    if device.type == "cpu":
        return DistributedTensorParallel(control, control)
    torch.cuda.set_device(device)
    group = torch.distributed.new_group(backend="nccl", device_id=device)
    return DistributedTensorParallel(group, control)


def share_cores(size: int, device: torch.device) -> None:
    """Processes on one CPU take an equal number of its cores each."""
    if device.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))


def leave() -> None:
    """Leaves the group that this process has joined."""
    torch.distributed.destroy_process_group()
