"""Forms that a loaded matrix may have, each with the product that reads it. Linear layers know no form."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional


class Matrix(Protocol):
    """A weight `[outputs, inputs]` with the bias of its product, in some form."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...


class HasMatrix(Protocol):
    """A module whose parameters are a matrix and its bias."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class PlainMatrix:
    """The parameters of a module themselves."""

    def __init__(self, module: HasMatrix) -> None:
        self._module = module

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        return functional.linear(x, self._module.weight, self._module.bias)
