"""A model of the torch backend spread over processes that speak gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from helpers.torch_paged_model import TorchPagedModel
from numpy.typing import NDArray

from torch_backend.parallel import DistributedTensorParallel


def run_ranks(
    folders: Sequence[Path],
    size: int,
    sequences: Sequence[NDArray[np.int32]],
    steps: Sequence[Mapping[int, int]],
    scratch: Path,
) -> list[list[list[NDArray[np.float32]]]]:
    """`TorchPagedModel.run` of each checkpoint on `size` processes: logits by rank, checkpoint, sequence."""
    arguments = (size, [str(folder) for folder in folders], list(sequences), list(steps), str(scratch))
    torch.multiprocessing.spawn(_run_rank, arguments, nprocs=size)
    return [torch.load(scratch / f"logits_{rank}", weights_only=False) for rank in range(size)]


def _run_rank(
    rank: int,
    size: int,
    folders: list[str],
    sequences: list[NDArray[np.int32]],
    steps: list[Mapping[int, int]],
    scratch: str,
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=size)
    world = torch.distributed.group.WORLD
    assert world is not None
    parallel = DistributedTensorParallel(world, world)
    found = [TorchPagedModel(Path(folder), parallel=parallel).run(sequences, steps) for folder in folders]
    torch.save(found, Path(scratch) / f"logits_{rank}")
    torch.distributed.destroy_process_group()
