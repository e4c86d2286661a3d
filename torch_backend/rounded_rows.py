"""Rows rounded to 8 bits, with a scale for each row, which some products take instead of plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows `[T, n]`: `values [room, n]`, int8 or float8 (e4m3), undefined from row T on, times `scales`, float32 `[T]`.
    `dtype`: of the numbers that were rounded, and of products."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.scales)

    def take(self, places: torch.Tensor) -> RoundedRows:
        """The rows at `places [M]`, without room for others."""
        # As bytes, because few devices index float8.
        values = self.values.view(torch.uint8)[places].view(self.values.dtype)
        return RoundedRows(values, self.scales[places], self.dtype)


Rows = torch.Tensor | RoundedRows
"""Rows `[T, n]`, as a product wants them."""


class Rounding(Protocol):
    """Rounds rows by themselves, or at the end of the operation that computes them: with the same bits as by the
    operation and then `round`. A row's scale is its largest magnitude over the largest number of the type. A row with a
    number that is not finite has scale NaN."""

    def round(self, x: torch.Tensor) -> RoundedRows:
        """Rounds `[T, n]`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> RoundedRows:
        """See `Operations.rms_norm`."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor]:
        """See `Operations.add_rms_norm`. May write the sum into `residual`."""
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> RoundedRows:
        """See `Operations.silu_mul` and `gelu_mul`."""
        ...


class Reader(Protocol):
    """What multiplies rows. `rounding`: how it wants them rounded, None for plain numbers."""

    @property
    def rounding(self) -> Rounding | None: ...


def rounding_for(*readers: Reader | None) -> Rounding | None:
    """The rounding that all readers of the same rows want; None if one wants plain numbers, or if they differ. A None
    among the readers counts for nothing."""
    first, *others = (each.rounding for each in readers if each is not None)
    return first if all(each == first for each in others) else None
