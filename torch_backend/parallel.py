"""Tensor parallelism: what one process of several does to agree with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed

from torch_backend.symmetric_memory import SymmetricSums


class TensorParallel(Protocol):
    """This process among those that share a model, after Megatron-LM (Shoeybi et al. 2019)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every process's `x`; may write it into `x`, which callers do not use again."""
        ...

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Every process's `x [..., n]` in the order of ranks: `[..., size * n]`."""
        ...

    def least(self, value: int) -> int:
        """The smallest of every process's `value`: what all of them can hold."""
        ...

    def on_host(self) -> TensorParallel:
        """The same processes, for tensors on the host."""
        ...


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """The whole model in one process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def least(self, value: int) -> int:
        """`value` itself."""
        return value

    def on_host(self) -> SingleProcess:
        """Itself."""
        return self


SINGLE = SingleProcess()


class DistributedTensorParallel:
    """A process of a `torch.distributed` group: nccl between GPUs, gloo between CPU processes.

    **Arguments:** `group`: what tensors go over; `control`: a gloo group of the same processes, for what the host says;
    `sums`: what adds up small tensors in place of `group`, where something does.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        control: torch.distributed.ProcessGroup,
        sums: SymmetricSums | None = None,
    ) -> None:
        self._group = group
        self._control = control
        self._sums = sums
        self._rank = torch.distributed.get_rank(group)
        self._size = torch.distributed.get_world_size(group)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`. Every rank gets the same bits."""
        if self._sums is not None:
            found = self._sums.all_reduce(x)
            if found is not None:
                return found
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """See `TensorParallel`."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)

    def least(self, value: int) -> int:
        """See `TensorParallel`. For start-up: waits for every process."""
        least = torch.tensor(value, dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._control)
        return int(least)

    def on_host(self) -> DistributedTensorParallel:
        """See `TensorParallel`: over gloo."""
        return DistributedTensorParallel(self._control, self._control)

    def abort(self) -> None:
        """Breaks off collectives that wait for a process which is gone; gloo notices by itself."""
        if self._group is not self._control:
            self._group.abort()
