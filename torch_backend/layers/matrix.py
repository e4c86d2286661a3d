"""What products read: matrices in any form, and the plain one."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation


class Matrix(Protocol):
    """A weight `[outputs, inputs]` with the bias of its product, in some form."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...


class InBlocks(Matrix, Protocol):
    """A matrix of small whole numbers in blocks, as a checkpoint stores it."""

    @property
    def bits(self) -> int:
        """Bits of a number."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Of a matrix that is gate and up, one after the other: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
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
