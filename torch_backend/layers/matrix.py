"""Forms that a loaded matrix may have, each with the product that reads it. Linear layers know no form."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from torch_backend.layers.packed import PackedMatrix


class Matrix(Protocol):
    """A form of a weight `[outputs, inputs]` with the bias of its product."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. `weight` and `bias` are the layer's
        parameters, whose values a form may keep elsewhere."""
        ...


class PlainMatrix:
    """The parameters themselves."""

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Matrix`."""
        return functional.linear(x, weight, bias)


class PackedForCpu:
    """Values in the order of oneDNN's kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = PackedMatrix(weight, bias)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Matrix`."""
        return self._packed.multiply(x)
