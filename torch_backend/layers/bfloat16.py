"""Matrices that stay in bfloat16, as a checkpoint stores them, in a model that computes in float32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from torch_backend.layers.parameter import Loadable


class Bfloat16Products(Protocol):
    """Products of rows of float32 with matrices of bfloat16, for any number of rows."""

    @property
    def least_outputs(self) -> int:
        """Outputs that a matrix must have; gate and up must have as many each."""
        ...

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [T, inputs]`, `weight [outputs, inputs]`, `bias [outputs]` float32 → `[T, outputs]`."""
        ...

    def multiply_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """For a matrix of gate and up, in this order: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        ...


@dataclass(frozen=True, slots=True)
class Bfloat16Weights:
    """The matrices of a model that stay in bfloat16, and their products."""

    names: Collection[ParameterName]
    products: Bfloat16Products


class Bfloat16Matrix(Loadable):
    """A weight `[outputs, inputs]` in bfloat16, and an optional bias of its product, float32. Rows, products and sums
    are float32."""

    def __init__(
        self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, products: Bfloat16Products
    ) -> None:
        super().__init__()
        self.shape, self.dtype = (outputs, inputs), torch.float32
        self.weight = self.declare("weight", (outputs, inputs), torch.bfloat16, *parts)
        self.bias = self.declare("bias", (outputs,), self.dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self._products = products

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`."""
        return self._products.multiply(x, self.weight, self.bias)

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See `Bfloat16Products`."""
        return self._products.multiply_gated(x, self.weight, self.bias, activation)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows `[T]` of the weight, `[T, inputs]`."""
        return functional.embedding(numbers, self.weight).to(self.dtype)
