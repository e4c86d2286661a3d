"""Sums over the GPUs of one machine in memory that each reads of the others: `torch.distributed._symmetric_memory`.

A sum that NCCL takes 12 to 15 us for, most of it waiting, takes a few where each GPU reads the others' numbers itself
(an estimate). Three kernels of torch's:

- **one-shot**: each rank adds up everything, in the order of ranks. One wait, but every rank reads all.
- **two-shot**: each rank adds up its share, in the order of ranks, and writes the sums to all.
- **multimem**: the same shares; the switch between the GPUs adds them up (NVLink SHARP) and hands the sums out.

Whichever it is, every rank gets the same bits: a sum is added up once and handed out, or by all in one order. torch's
one-shot kernel adds in the order of ranks for 2, 4 and 8 of them only, and `multimem_one_shot_all_reduce` has each rank
ask the switch by itself, so that nothing says that two of them are told the same: neither is used.

What does not fit (other types, larger sums than the buffer) is NCCL's. What is chosen depends on the shape alone, so
that all ranks choose alike.
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
"""Which torch's kernels add up. Of bfloat16 `multimem` keeps sums of all ranks in float32, the others in bfloat16."""

_ALIGNMENT = 16
_IN_ORDER = (2, 4, 8)
"""Ranks whose numbers the one-shot kernel adds in the order of ranks on every rank."""

_ONE_SHOT_BYTES = 2**20
"""That one rank reads of the others at most. Beyond it the second wait of the other kernels costs less than reading
everything everywhere (an estimate)."""

_BUFFER_BYTES = 16 * 2**20
"""Sums of 1,024 tokens of 8,192 numbers in bfloat16. Larger ones are bound by the links, and NCCL's as fast."""


class NoSymmetricMemoryError(Exception):
    """GPUs that cannot read each other's memory, and why."""


class Method(Enum):
    """How a sum is added up: see the module."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    MULTIMEM = "multimem"


class Handle(Protocol):
    """What a rendezvous gives, `_SymmetricMemory`: the address of the group's multicast memory, 0 for none."""

    @property
    def multicast_ptr(self) -> int: ...


class Library(Protocol):
    """`torch.distributed._symmetric_memory` and `torch.ops.symm_mem`, as far as they are used."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that others may read once they have met there."""
        ...

    def rendezvous(self, buffer: torch.Tensor, group_name: str) -> Handle:
        """All ranks of the group show each other their buffers. Raises `RuntimeError` where GPUs cannot."""
        ...

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, local: torch.Tensor, operation: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor: ...

    def two_shot_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor: ...

    def multimem_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor: ...


class TorchLibrary:
    """torch's own."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Library`."""
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.empty(size, dtype=dtype, device=device)

    def rendezvous(self, buffer: torch.Tensor, group_name: str) -> Handle:
        """See `Library`."""
        import torch.distributed._symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(buffer, torch.distributed.GroupName(group_name))

    def one_shot_all_reduce_copy_out(
        self, buffer: torch.Tensor, local: torch.Tensor, operation: str, group_name: str, out: torch.Tensor
    ) -> torch.Tensor:
        """See `Library`."""
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, local, operation, group_name, out)
        return found

    def two_shot_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        """See `Library`."""
        found: torch.Tensor = torch.ops.symm_mem.two_shot_all_reduce_(buffer, operation, group_name)
        return found

    def multimem_all_reduce_(self, buffer: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        """See `Library`."""
        found: torch.Tensor = torch.ops.symm_mem.multimem_all_reduce_(buffer, operation, group_name)
        return found


@dataclass(frozen=True, slots=True)
class SymmetricSums:
    """Sums of the ranks of one group.

    - `buffer`: bytes that every rank has shown the others.
    - `multicast`: whether the GPUs' switch adds up.
    """

    library: Library
    group_name: str
    size: int
    buffer: torch.Tensor
    multicast: bool

    @classmethod
    def meet(
        cls,
        group_name: str,
        size: int,
        device: torch.device,
        agree: Callable[[bool], bool],
        library: Library | None = None,
    ) -> SymmetricSums:
        """Meets the other ranks, which all call this.

        **Arguments:** `agree`: whether all ranks say yes.

        **Raises:** `NoSymmetricMemoryError` with the reason, on every rank if on one.
        """
        library = TorchLibrary() if library is None else library
        buffer = _agreed(agree, lambda: library.empty(_BUFFER_BYTES, torch.uint8, device))
        handle = _agreed(agree, lambda: library.rendezvous(buffer, group_name))
        return cls(library, group_name, size, buffer, agree(handle.multicast_ptr != 0))

    def method(self, x: torch.Tensor) -> Method | None:
        """How the sum of `x` is added up; None: not here."""
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
        """The largest sum that is added up in one shot, 0 for none."""
        return _ONE_SHOT_BYTES // (self.size - 1) if self.size in _IN_ORDER else 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of every rank's `x`, maybe in `x` itself; None where `method` is."""
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


def _agreed(agree: Callable[[bool], bool], attempt: Callable[[], T]) -> T:
    """What `attempt` gives, where it gives something on every rank. Raises `NoSymmetricMemoryError`."""
    try:
        found = attempt()
    except RuntimeError as error:
        agree(False)
        raise NoSymmetricMemoryError(str(error).strip().split("\n")[0]) from error
    if not agree(True):
        raise NoSymmetricMemoryError("another rank cannot; for the reason see its log")
    return found
