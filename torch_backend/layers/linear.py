"""Linear layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from torch_backend.layers.packed import PackedMatrix
from torch_backend.layers.parameter import forget, parameter


class Linear(nn.Module):
    """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. The weight is `[outputs, inputs]`.

    Several matrices that multiply the same input are one weight, one after the other along the outputs.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype) if bias else None
        self._packed: PackedMatrix | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed.multiply(x)
        return functional.linear(x, self.weight, self.bias)

    def pack(self, *, keep_plain: bool = False) -> None:
        """Packs the loaded weight for the CPU's kernels, and forgets the plain one unless something else needs it."""
        self._packed = PackedMatrix(self.weight, self.bias)
        if not keep_plain:
            self.weight = forget(self.weight)
