"""Tensor parallelism: collectives between the processes that share a model."""

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
        """Returns the sum of every process's `x`; may overwrite `x`, which callers do not use again."""
        ...

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenates every process's `x [..., n]` in the order of ranks: `[..., size * n]`."""
        ...

    def minimum(self, value: int) -> int: ...

    def on_host(self) -> TensorParallel:
        """Returns the same processes, for tensors on the host."""
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
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value

    def on_host(self) -> SingleProcess:
        return self


SINGLE = SingleProcess()


class DistributedTensorParallel:
    """A process of a `torch.distributed` group: nccl between GPUs, gloo between CPU processes. `group`: for tensors on
    the device; `control`: a gloo group of the same processes, for values of the host; `sums`: adds up small tensors
    instead of `group`, if available; `in_order`: sums are in the order of ranks, whatever the size of a tensor. A
    library's order depends on the size, and on an element's place."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        control: torch.distributed.ProcessGroup,
        sums: SymmetricSums | None = None,
        *,
        in_order: bool = False,
    ) -> None:
        self._group = group
        self._control = control
        self._sums = sums
        self._in_order = in_order
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
        if self._in_order:
            first, *others = self._gather(x)
            total = first.float()
            for other in others:
                total = total.add_(other)
            return total.to(x.dtype)
        if self._sums is not None:
            found = self._sums.all_reduce(x)
            if found is not None:
                return found
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x), dim=-1)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every process's `x`, in the order of ranks."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self._size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self._group)
        return parts

    def minimum(self, value: int) -> int:
        """See `TensorParallel`. For start-up: waits for every process."""
        least = torch.tensor(value, dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._control)
        return int(least)

    def on_host(self) -> DistributedTensorParallel:
        """See `TensorParallel`: over gloo."""
        return DistributedTensorParallel(self._control, self._control, in_order=self._in_order)

    def abort(self) -> None:
        """Aborts collectives that wait for a lost process; gloo notices by itself."""
        if self._group is not self._control:
            self._group.abort()
