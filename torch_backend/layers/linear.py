"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_jax.architectures.tensor_names import Kind, Part
from torch_backend.layers.matrix import Matrix, PlainMatrix
from torch_backend.layers.parameter import Loadable, forget
from torch_backend.layers.weight_format import WeightFormat


class Linear(Loadable):
    """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. The weight is `[outputs, inputs]`.

    Several matrices that multiply the same input are one weight, one after the other along the outputs: `parts`.
    """

    def __init__(self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), dtype, *parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None
        self._matrix: Matrix = PlainMatrix(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix.multiply(x)

    def arrange(self, form: WeightFormat, *, keep_plain: bool = False) -> None:
        """Puts the loaded weight in a format, and forgets the plain one unless something else needs it."""
        self._matrix = form.matrix(self)
        if not keep_plain:
            self.weight = forget(self.weight)
