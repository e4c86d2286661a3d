"""Matrices: what a layer multiplies by, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.parameter import Loadable, forget
from torch_backend.layers.scaled_products import VALUE_TYPES, ScaledProduct, multiply_widened, product_for


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


class ScaledMatrix(Loadable):
    """Values of 8 bits `[outputs, inputs]`, a float32 scale of each row, and a bias of the product, if there is one."""

    def __init__(
        self,
        encoding: Encoding,
        inputs: int,
        outputs: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        values = VALUE_TYPES[encoding.values]
        self.encoding = encoding
        self.values = self.declare("values", (outputs, inputs), values, *parts, role=Role.VALUES)
        self.scales = self.declare("scales", (outputs,), torch.float32, *parts, role=Role.SCALES)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None
        self._product: ScaledProduct = multiply_widened

    def choose_product(self, device: torch.device, dtype: torch.dtype) -> None:
        """The quickest product on a device; until then values are widened."""
        self._product = product_for(self.encoding, tuple(self.values.shape), device, dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`."""
        return self._product(x, self.values, self.scales, self.bias)


def matrix_for(
    encoding: Encoding | None, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype
) -> PlainMatrix | ScaledMatrix:
    """A matrix without values, of the class for how it is stored: what has blocks is widened to `dtype`, the type of
    products. `parts`: the matrices that it is made of."""
    if encoding is None or encoding.block is not None:
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    return ScaledMatrix(encoding, inputs, outputs, parts, bias=bias, dtype=dtype)
