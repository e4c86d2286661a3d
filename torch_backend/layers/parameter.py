"""Weights before and after they are loaded."""

from __future__ import annotations

import torch
from torch import nn


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A weight yet without a value: a shape on the meta device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def forget(value: nn.Parameter) -> nn.Parameter:
    """The shape of a weight whose value is kept elsewhere."""
    return parameter(tuple(value.shape), value.dtype)
