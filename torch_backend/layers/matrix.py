"""Matrices: what a layer multiplies by, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import Kind, Part
from torch_backend.layers.parameter import Loadable, forget


class InBlocks(Protocol):
    """A matrix of small whole numbers in blocks, as a checkpoint stores it."""

    @property
    def bits(self) -> int:
        """Bits of a number."""
        ...

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Of a matrix that is gate and up, one after the other: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        ...


class PlainMatrix(Loadable):
    """A weight `[outputs, inputs]` of numbers, and the bias of its product, `[outputs]`, if there is one."""

    def __init__(self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), dtype, *parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        return functional.linear(x, self.weight, self.bias)

    def let_go(self) -> None:
        """Forgets the weight, which is kept elsewhere in another layout."""
        self.weight = forget(self.weight)
