"""Norms with the residual stream: RMS norm and layer norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from torch_backend.layers.parameter import Loadable
from torch_backend.operations import Operations
from torch_backend.rounded_rows import Rounding, Rows


class Norm(Loadable):
    """A norm over the hidden axis: see `NormConfig`."""

    def __init__(
        self, size: int, config: NormConfig, part: Part, *, dtype: torch.dtype, operations: Operations
    ) -> None:
        super().__init__()
        self.weight = self.declare("weight", (size,), torch.float32 if config.weight_in_float32 else dtype, part)
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = self.declare("bias", (size,), self.weight.dtype, part, kind=ParameterKind.BIAS)
        self.eps = config.eps
        self._kind, self._replaces_sum = config.kind, config.replaces_sum
        self._operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kind is NormKind.RMS:
            return self._operations.rms_norm(x, self.weight, self.eps)
        bias = None if self.bias is None else self.bias.float()
        return functional.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `x [T, hidden]` to the residual stream, or starts one; returns the norm and the stream: see
        `NormConfig`. May overwrite both arguments."""
        if self._replaces_sum:
            normed = self(x if residual is None else residual.add_(x))
            return normed, normed
        if residual is None:
            return self(x), x
        if self._kind is NormKind.RMS:
            return self._operations.add_rms_norm(x, residual, self.weight, self.eps)
        residual = residual.add_(x)
        return self(residual), residual

    def rows_for(self, rounding: Rounding | None, x: torch.Tensor) -> Rows:
        """The norm as the matrices that read it want it."""
        if rounding is None or self._kind is not NormKind.RMS:
            found: torch.Tensor = self(x)
            return found if rounding is None else rounding.round(found)
        return rounding.rms_norm(x, self.weight, self.eps)

    def add_for(
        self, rounding: Rounding | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor]:
        """`add`, with the norm as the matrices that read it want it."""
        if residual is None and not self._replaces_sum:
            return self.rows_for(rounding, x), x
        if residual is None or rounding is None or self._replaces_sum or self._kind is not NormKind.RMS:
            normed, total = self.add(x, residual)
            return normed if rounding is None else rounding.round(normed), total
        return rounding.add_rms_norm(x, residual, self.weight, self.eps)


def add_without_norm(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Norm.add` without the norm, for blocks that read the residual stream itself."""
    total = x if residual is None else residual.add_(x)
    return total, total
