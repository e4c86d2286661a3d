"""The fused operations of a decoder layer as Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels.gated_activation import gelu_mul, rounded_gated, silu_mul
from torch_backend.kernels.rms_norm import add_rms_norm, rms_norm, rounded_add_rms_norm, rounded_rms_norm
from torch_backend.kernels.rotate_and_write import rotate_and_write
from torch_backend.kernels.rounding import round_rows
from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.parallel import TensorParallel
from torch_backend.rounded_rows import RoundedRows


class TritonOperations:
    """Implements `torch_backend.operations.Operations` with one kernel launch per call. No tensor is read on the host,
    so all of it can be captured in a CUDA graph. `dependent`: see `Chip.dependent_launches`."""

    def __init__(self, dependent: bool = False) -> None:
        self._dependent = dependent

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, self._dependent)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations`; writes the norm into `x` and the sum into `residual`."""
        return add_rms_norm(x, residual, weight, eps, self._dependent)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, parallel: TensorParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(parallel.all_reduce(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up, self._dependent)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up, self._dependent)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        return rotate_and_write(qkv, rotation, norms, kv, write_slots, self._dependent)


@dataclass(frozen=True, slots=True)
class TritonRounding:
    """Implements `torch_backend.rounded_rows.Rounding` with one kernel launch per call, except for gates of very long
    rows. `values`: int8 or float8 (e4m3); `dependent`: see `Chip.dependent_launches`."""

    values: torch.dtype
    dependent: bool = False

    def round(self, x: torch.Tensor) -> RoundedRows:
        return round_rows(x.contiguous(), self.values, self.dependent)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> RoundedRows:
        return rounded_rms_norm(x, weight, eps, self.values, self.dependent)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor]:
        """See `Rounding`; writes the sum into `residual`."""
        return rounded_add_rms_norm(x, residual, weight, eps, self.values, self.dependent)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> RoundedRows:
        return rounded_gated(gate_up, activation, self.values, self.dependent)
