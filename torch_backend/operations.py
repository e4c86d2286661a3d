"""Fused operations of a decoder layer, as the model calls them; each has a native and a Triton version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from torch_backend.kv_pages import KVPages
from torch_backend.parallel import TensorParallel


@dataclass(frozen=True)
class Rotation:
    """Rotary tables of a step: cosines and sines, float32 `[T, head_dim / 2]`, of each token's position. Pairs of a
    head are (i, i + head_dim / 2), as in Llama checkpoints."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @cached_property
    def of_whole_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables for whole heads, `[T, 1, head_dim]` each: a rotated head is the head times the first table, plus
        the head with its halves swapped times the second. Computed once for all layers."""
        cosines = torch.cat((self.cosines, self.cosines), dim=-1)
        sines = torch.cat((-self.sines, self.sines), dim=-1)
        return cosines[:, None], sines[:, None]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of queries and keys over head_dim, before the rotation (Qwen3): weights `[head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Operations(Protocol):
    """All sums are float32; results have the dtype of their input, rounded once."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich 2019): `[T, hidden]`."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of `x + residual`, and that sum, rounded to its dtype before the norm. Both `[T, hidden]`.
        An implementation may write the sum into `residual` and the norm into `x`; callers use neither again."""
        ...

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, parallel: TensorParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `add_rms_norm` of the sum of every rank's `x` and of `residual`, which is the same on every rank:
        with the same bits on every rank, those of an all-reduce followed by `add_rms_norm`. May overwrite both."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of `[T, 2 * intermediate]`, gate first: `[T, intermediate]`."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same with `gelu(gate)`, by the tanh approximation."""
        ...

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """Applies norms (if given) and rotation to queries and keys, and stores keys and values in their slots. `qkv`
        `[T, (heads + 2 * kv_heads) * head_dim]`: all queries, all keys, all values of each token. Returns queries `[T,
        heads, head_dim]`, contiguous."""
        ...
