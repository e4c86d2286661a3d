"""Ranks with equal data, in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EqualRanks:
    """One of `size` ranks, whose data the others have too."""

    size: int = 2
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.size)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def minimum(self, value: int) -> int:
        return value

    def on_host(self) -> EqualRanks:
        return self
