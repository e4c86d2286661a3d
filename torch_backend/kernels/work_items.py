"""Work of unequal sequences cut into items, on the device: programs of a fixed-size launch find theirs in two reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Items of R sequences, those of one sequence consecutive: `starts` int32 `[R + 1]`, sequence s has the items
    `starts[s] : starts[s + 1]`, the last entry is their number; `owners` int32 `[bound]`, the sequence of each item,
    undefined after the last one."""

    starts: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, bound: int, device: torch.device) -> WorkItems:
        """Room for `bound` items, to be filled by a kernel with one program per row that calls `write_items`."""
        starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
        return cls(starts, torch.empty(max(bound, 1), dtype=torch.int32, device=device))


@triton.jit
def write_items(starts, owners, row, rows, before, count, BLOCK: tl.constexpr):
    """Writes the `count` items of `row`, after the `before` items of the rows before it."""
    tl.store(starts + row, before)
    if row == rows - 1:
        tl.store(starts + rows, before + count)
    lanes = tl.arange(0, BLOCK)
    for place in range(0, count, BLOCK):
        tl.store(owners + before + place + lanes, tl.zeros([BLOCK], tl.int32) + row, mask=place + lanes < count)
