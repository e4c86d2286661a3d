"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_jax.architectures.tensor_names import Kind, Part
from torch_backend.layers.by_rows import ByRows, Form
from torch_backend.layers.matrix import InBlocks, Matrix, PlainMatrix
from torch_backend.layers.packed import PackedMatrix
from torch_backend.layers.parameter import Loadable, forget


class Linear(Loadable):
    """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. The weight is `[outputs, inputs]`.

    Several matrices that multiply the same input are one weight, one after the other along the outputs: `parts`.
    """

    def __init__(self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), dtype, *parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None
        self._matrix: Matrix = PlainMatrix(self)
        self.blocks: InBlocks | None = None
        """The matrix as a checkpoint stores it, where that is kept; `pack` takes it into use."""
        self.by_rows: ByRows | None = None
        """Its two forms, where it has two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix.multiply(x)

    def pack(self, *, keep_plain: bool = False) -> None:
        """Packs the loaded weight for the CPU's kernels, and forgets the plain one unless something else needs it."""
        packed = PackedMatrix(self.weight, self.bias)
        self._matrix = packed
        if self.blocks is not None:
            form = Form(self.weight.shape[0], self.weight.shape[1], self.blocks.bits, gated=False)
            self._matrix = self.by_rows = ByRows(form, self.blocks.multiply, packed.multiply, self.weight.dtype)
        if not keep_plain:
            self.weight = forget(self.weight)
