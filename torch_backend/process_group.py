"""The `torch.distributed` group of the processes that share a model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed

from sglang_jax.errors import ConfigError
from torch_backend.parallel import DistributedTensorParallel
from torch_backend.symmetric_memory import NoSymmetricMemoryError, SymmetricSums

logger = logging.getLogger(__name__)

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def join(
    rank: int,
    size: int,
    meeting_point: Path,
    device: torch.device,
    *,
    custom_all_reduce: bool = True,
    in_order: bool = False,
) -> DistributedTensorParallel:
    """Joins the group; blocks until every rank has joined. `meeting_point`: a file that does not exist before the first
    rank joins; `custom_all_reduce`: whether GPUs add up in symmetric memory if they can, instead of with NCCL;
    `in_order`: see `DistributedTensorParallel`. Raises `ConfigError` if this process is already in a group."""
    if torch.distributed.is_initialized():
        raise ConfigError(
            "tp_size above 1 needs torch.distributed, which this process already uses: start the engine in "
            "a separate process"
        )
    with _over_loopback():
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size)
    control = torch.distributed.group.WORLD
    assert control is not None
    if device.type == "cpu":
        return DistributedTensorParallel(control, control, in_order=in_order)
    torch.cuda.set_device(device)
    group = torch.distributed.new_group(backend="nccl", device_id=device)
    if in_order:
        logger.info("Sums over ranks: in the order of ranks, for results that do not depend on the batch")
        return DistributedTensorParallel(group, control, in_order=True)
    sums = _symmetric_sums(DistributedTensorParallel(group, control), group.group_name, device, custom_all_reduce)
    return DistributedTensorParallel(group, control, sums)


def _symmetric_sums(
    parallel: DistributedTensorParallel, group_name: str, device: torch.device, wanted: bool
) -> SymmetricSums | None:
    """Returns sums in symmetric memory, on all ranks or on none; the log says which, and why."""
    if not wanted:
        logger.info("Sums over ranks: NCCL, because of --disable-custom-all-reduce")
        return None
    try:
        sums = SymmetricSums.connect(group_name, parallel.size, device, lambda yes: parallel.minimum(int(yes)) == 1)
    except NoSymmetricMemoryError as error:
        logger.info("Sums over ranks: NCCL, because the GPUs cannot read each other's memory: %s", error)
        return None
    logger.info("Sums over ranks: symmetric memory, %s", sums)
    return sums


@contextmanager
def _over_loopback() -> Iterator[None]:
    """Has gloo listen on the loopback interface, because it accepts any connection and all ranks are on this machine.
    gloo reads only the environment; an interface that the user has set there is kept."""
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[_GLOO_INTERFACE]


def share_cores(size: int, device: torch.device) -> None:
    """Divides torch's threads by `size`, on a CPU, whose cores the processes share: for this thread, and for those that
    use torch later."""
    if device.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))


def leave() -> None:
    torch.distributed.destroy_process_group()
