"""Triton's norms and gates in models whose heads are too small for its other kernels."""

from __future__ import annotations

import torch

from torch_backend.kernels.operations import TritonOperations
from torch_backend.native_operations import NativeOperations

_TRITON = TritonOperations()


class TritonNorms(NativeOperations):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _TRITON.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _TRITON.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _TRITON.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _TRITON.gelu_mul(gate_up)
