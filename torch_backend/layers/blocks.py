"""Interfaces of matrices in a checkpoint's quantised blocks, and of their kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.encoding import Encoding, Stored


class BlockedMatrix(Protocol):
    """A matrix of quantised values in blocks, as a checkpoint stores it."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    @property
    def columns(self) -> int:
        """Columns that `multiply_into` writes: as many as outputs, or some more."""
        ...

    def multiply_into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Like `multiply`, into the first columns of `output`, which may be a part of a larger matrix."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """For a matrix of gate and up, in this order: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        ...

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Dequantised rows `[T]` of a matrix that serves all rows, `[T, inputs]` in the dtype of products."""
        ...


class BlockMatrices(Protocol):
    """Creates matrices from blocks, with kernels for this machine."""

    @property
    def outputs_together(self) -> int:
        """Outputs that are computed together. They divide half of the outputs of a matrix that is gate and up, and
        should divide those of others, which are filled up with zeros."""
        ...

    @property
    def serves_all_rows(self) -> bool:
        """Whether products are fast for many rows too, so that a matrix needs no other form."""
        ...

    def work(self, encoding: Encoding, *, gated: bool) -> bool:
        """Whether products of an encoding, or gated ones, are supported here and correct; a failure is logged."""
        ...

    def matrix(self, blocks: Stored, bias: torch.Tensor | None) -> BlockedMatrix:
        """Returns a matrix for kernels."""
        ...
