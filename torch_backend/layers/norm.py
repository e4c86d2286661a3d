"""Root-mean-square normalisation with the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from torch_backend.layers.parameter import parameter
from torch_backend.operations import Operations


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) over the hidden axis."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, operations: Operations) -> None:
        super().__init__()
        self.weight = parameter((size,), dtype)
        self.eps = eps
        self._operations = operations

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `x [T, hidden]` to the residual stream, or begins one with it: the sum normalised, and the sum.

        The arguments may be overwritten."""
        if residual is None:
            return self._operations.rms_norm(x, self.weight, self.eps), x
        return self._operations.add_rms_norm(x, residual, self.weight, self.eps)
