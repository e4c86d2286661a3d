"""What a model gives for a text: a vector, or scores of labels."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_jax.architectures.pooling import Pooler
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.runner.plan import MAX_SUMMED, SUM_STEP
from torch_backend.layers.parameter import Loadable


class PooledHead(Loadable):
    """Vectors, or scores by a matrix `[labels, hidden]` in float32, perhaps after a dense layer; every rank computes
    all of them."""

    def __init__(self, pooler: Pooler, hidden_size: int) -> None:
        super().__init__()
        labels = len(pooler.labels)
        self.labels = self.bias = self.dense = self.dense_bias = None
        if labels and pooler.dense:
            of_part = (torch.float32, Part.POOLER)
            self.dense = self.declare("dense", (hidden_size, hidden_size), *of_part)
            self.dense_bias = self.declare("dense_bias", (hidden_size,), *of_part, kind=ParameterKind.BIAS)
        if labels:
            self.labels = self.declare("labels", (labels, hidden_size), torch.float32, Part.LABELS)
        if labels and pooler.bias:
            self.bias = self.declare("bias", (labels,), torch.float32, Part.LABELS, kind=ParameterKind.BIAS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` → float32 `[m, width]`."""
        if self.labels is None:
            return hidden.float()
        # Sums in float64, rounded once, so that the number of rows does not show.
        found = hidden.double()
        if self.dense is not None and self.dense_bias is not None:
            found = torch.tanh(functional.linear(found, self.dense.double(), self.dense_bias.double()))
        found = found @ self.labels.double().T
        return found.float() if self.bias is None else (found + self.bias).float()


def sum_of(hidden: torch.Tensor) -> torch.Tensor:
    """The exact sum of `hidden` `[m, hidden]`, float64 `[hidden]`: see `StepResult.pooled`."""
    steps = torch.round(hidden.double() / SUM_STEP)
    found = steps.sum(0) * SUM_STEP
    fits = (hidden.abs() < MAX_SUMMED).all()
    return torch.where(fits, found, torch.full_like(found, torch.nan))
