"""A model of the torch backend sharded over processes that communicate by gloo, or over threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from helpers.torch_paged_model import TorchPagedModel
from numpy.typing import NDArray

from torch_backend.parallel import DistributedTensorParallel

T = TypeVar("T")


@dataclass
class ThreadRank:
    """One of several threads that sum as ranks do: in rank order, into the given tensors."""

    rank: int
    size: int
    barrier: threading.Barrier
    given: list[torch.Tensor | None]
    sums: int = field(default=0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x.copy_(torch.stack(self._everyones(x)).sum(0))

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._everyones(x), -1)

    def _everyones(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.rank] = x.clone()
        self.barrier.wait(60)
        found = [each for each in self.given if each is not None]
        self.barrier.wait(60)
        return found

    def minimum(self, value: int) -> int:
        raise NotImplementedError

    def on_host(self) -> ThreadRank:
        return self


def thread_ranks(size: int) -> list[ThreadRank]:
    """Ranks that communicate with each other."""
    barrier, given = threading.Barrier(size), [None] * size
    return [ThreadRank(rank, size, barrier, given) for rank in range(size)]


def on_threads(actions: Sequence[Callable[[], T]]) -> list[T]:
    """The result of each action, all run at the same time."""
    with ThreadPoolExecutor(len(actions)) as pool:
        return [each.result() for each in [pool.submit(action) for action in actions]]


def run_ranks(
    folders: Sequence[Path],
    size: int,
    sequences: Sequence[NDArray[np.int32]],
    steps: Sequence[Mapping[int, int]],
    scratch: Path,
    options: Sequence[Mapping[str, object]] | None = None,
) -> list[list[list[NDArray[np.float32]]]]:
    """`TorchPagedModel.run` of each checkpoint on `size` processes: logits by rank, checkpoint, sequence. `options`: of
    the model of each checkpoint."""
    models = [(str(folder), dict(more)) for folder, more in zip(folders, options or [{}] * len(folders), strict=True)]
    arguments = (size, models, list(sequences), list(steps), str(scratch))
    torch.multiprocessing.spawn(_run_rank, arguments, nprocs=size)
    return [torch.load(scratch / f"logits_{rank}", weights_only=False) for rank in range(size)]


def _run_rank(
    rank: int,
    size: int,
    models: list[tuple[str, dict[str, object]]],
    sequences: list[NDArray[np.int32]],
    steps: list[Mapping[int, int]],
    scratch: str,
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=size)
    world = torch.distributed.group.WORLD
    assert world is not None
    parallel = DistributedTensorParallel(world, world)
    loaded = (TorchPagedModel(Path(folder), parallel=parallel, **options) for folder, options in models)
    found = [model.run(sequences, steps) for model in loaded]
    torch.save(found, Path(scratch) / f"logits_{rank}")
    torch.distributed.destroy_process_group()
