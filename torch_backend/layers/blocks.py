"""Interfaces of matrices in a checkpoint's quantised blocks, and of their kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.encoding import Encoding, Stored


class BlockedMatrix(Protocol):
    """A matrix of quantised values in blocks, as a checkpoint stores it."""

    @property
    def bits(self) -> int:
        """Bits of a value."""
        ...

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """For a matrix of gate and up, in this order: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        ...


class BlockMatrices(Protocol):
    """Creates matrices from blocks, with kernels for this machine."""

    @property
    def outputs_together(self) -> int:
        """A divisor of the outputs of every matrix, and of half of them if it is gate and up."""
        ...

    def work(self, encoding: Encoding, *, gated: bool) -> bool:
        """Whether products of an encoding, or gated ones, are supported here and correct; a failure is logged."""
        ...

    def matrix(self, blocks: Stored, bias: torch.Tensor | None) -> BlockedMatrix:
        """Returns a matrix with a multiple of `outputs_together` outputs."""
        ...
