"""Linear layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from torch_backend.layers.parameter import parameter


class Linear(nn.Module):
    """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. The weight is `[outputs, inputs]`.

    Several matrices that multiply the same input are one weight, one after the other along the outputs.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype)
        self.bias = parameter((outputs,), dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)
