"""Sums over the GPUs of one machine in memory that each GPU can read: `torch.distributed._symmetric_memory`.

NCCL takes 12 to 15 us for a small sum, most of it waiting; a kernel in which each GPU reads the others' values takes a
few (an estimate). Three of torch's kernels are used:

- **one-shot**: each rank adds up everything, in the order of ranks. It waits once, but every rank reads all values.
- **two-shot**: each rank adds up its share, in the order of ranks, and writes the sums to all ranks.
- **multimem**: as two-shot, but the switch between the GPUs adds up and distributes the sums (NVLink SHARP).

With each of them, all ranks get the same bits: a sum is computed once and distributed, or computed by all in the same
order. torch's one-shot kernel adds in the order of ranks only for 2, 4 and 8 ranks, and `multimem_one_shot_all_reduce`
asks the switch once per rank, so equal results are not guaranteed: neither is used.

Other sums (of other dtypes, or larger than the buffer) use NCCL. Only dtype, shape and layout decide, which are the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import torch
import torch.distributed

T = TypeVar("T")

_SUM = "sum"
_TYPES = (torch.bfloat16, torch.float32)
"""Dtypes that torch's kernels add up. `multimem` accumulates bfloat16 in float32, the others in bfloat16."""

_ALIGNMENT = 16
_IN_ORDER = (2, 4, 8)
"""Numbers of ranks for which the one-shot kernel adds in the order of ranks on every rank."""

_ONE_SHOT_BYTES = 2**20
"""Maximum bytes that one rank reads of the others. Above it, the second wait of the other kernels costs less than
reading everything on every rank (an estimate)."""

_BUFFER_BYTES = 16 * 2**20
"""Sums of 1,024 tokens of 8,192 values in bfloat16. Larger sums are limited by the links, where NCCL is as fast."""


class NoSymmetricMemoryError(Exception):
    """The GPUs cannot read each other's memory; the message gives the reason."""


class Method(Enum):
    """How a sum is computed: see the module."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    MULTIMEM = "multimem"


class Handle(Protocol):
    """The result of a rendezvous, `_SymmetricMemory`. `multicast_ptr`: multicast memory of the group, or 0."""

    @property
    def multicast_ptr(self) -> int: ...


class Library(Protocol):
    """The functions of `torch.distributed._symmetric_memory` and `torch.ops.symm_mem` that are used."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates memory that other ranks may read after a rendezvous."""
        ...

    def rendezvous(self, buffer: torch.Tensor, group_name: str) -> Handle:
        """Exchanges buffers between all ranks of the group. Raises `RuntimeError` if the GPUs cannot."""
        ...

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, local: torch.Tensor, operation: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor: ...

    def two_shot_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor: ...

    def multimem_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor: ...


class TorchLibrary:
    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.empty(size, dtype=dtype, device=device)

    def rendezvous(self, buffer: torch.Tensor, group_name: str) -> Handle:
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(buffer, torch.distributed.GroupName(group_name))

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, local: torch.Tensor, operation: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, local, operation, group_name, out)
        return found

    def two_shot_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        found: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(buffer, operation, group_name)
        return found

    def multimem_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        found: torch.Tensor = torch.ops.symm_mem.multimem_all_reduce_(buffer, operation, group_name)
        return found


@dataclass(frozen=True, slots=True)
class SymmetricSums:
    """Sums over the ranks of one group, in a `buffer` of bytes that they share. `multicast`: whether the switch adds
    up."""

    library: Library
    group_name: str
    size: int
    buffer: torch.Tensor
    multicast: bool

    @classmethod
    def connect(
        cls,
        group_name: str,
        size: int,
        device: torch.device,
        agree: Callable[[bool], bool],
        library: Library | None = None,
    ) -> SymmetricSums:
        """Exchanges buffers with the other ranks, which must all call this. `agree`: returns whether its argument is
        true on all ranks. Raises `NoSymmetricMemoryError` with the reason, on all ranks if on one."""
        library = TorchLibrary() if library is None else library
        buffer = _agree_on(agree, lambda: library.empty(_BUFFER_BYTES, torch.uint8, device))
        handle = _agree_on(agree, lambda: library.rendezvous(buffer, group_name))
        return cls(library, group_name, size, buffer, agree(handle.multicast_ptr != 0))

    def method(self, x: torch.Tensor) -> Method | None:
        """How the sum of `x` is computed; None if not in symmetric memory."""
        num_bytes = x.numel() * x.element_size()
        offset = x.storage_offset() * x.element_size()
        if x.dtype not in _TYPES or not x.is_contiguous() or num_bytes % _ALIGNMENT or offset % _ALIGNMENT:
            return None
        if not 0 < num_bytes <= self.buffer.numel():
            return None
        if num_bytes <= self.one_shot_bytes:
            return Method.ONE_SHOT
        return Method.MULTIMEM if self.multicast else Method.TWO_SHOT

    @property
    def one_shot_bytes(self) -> int:
        """Maximum bytes of a sum that is computed in one shot, 0 for none."""
        return _ONE_SHOT_BYTES // (self.size - 1) if self.size in _IN_ORDER else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the sum of every rank's `x`, possibly in `x` itself; None if `method` is None."""
        method = self.method(x)
        if method is None:
            return None
        shared = self.buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        if method is Method.ONE_SHOT:
            out = torch.empty_like(x)
            return self.library.one_shot_all_reduce_copy_out(shared, x, _SUM, self.group_name, out)
        shared.copy_(x)
        add_up = self.library.multimem_all_reduce_ if method is Method.MULTIMEM else self.library.two_shot_all_reduce_
        return x.copy_(add_up(shared, _SUM, self.group_name))

    def __str__(self) -> str:
        large = Method.MULTIMEM if self.multicast else Method.TWO_SHOT
        small = f"one-shot up to {self.one_shot_bytes // 1024} KiB, " if self.one_shot_bytes else ""
        return f"{small}{large.value} up to {self.buffer.numel() // 2**20} MiB, NCCL beyond"


def _agree_on(agree: Callable[[bool], bool], attempt: Callable[[], T]) -> T:
    """Returns the result of `attempt`. Raises `NoSymmetricMemoryError` if it failed on any rank."""
    try:
        found = attempt()
    except RuntimeError as error:
        agree(False)
        raise NoSymmetricMemoryError(str(error).strip().split("\n")[0]) from error
    if not agree(True):
        raise NoSymmetricMemoryError("another rank cannot; for the reason see its log")
    return found
