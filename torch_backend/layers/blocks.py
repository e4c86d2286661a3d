"""What layers ask of matrices in the blocks in which a checkpoint stores them, and of who makes these."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.encoding import Encoding, Stored


class InBlocks(Protocol):
    """A matrix of small whole numbers in blocks, as a checkpoint stores it."""

    @property
    def bits(self) -> int:
        """Bits of a number."""
        ...

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Of a matrix that is gate and up, one after the other: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        ...


class BlockMatrices(Protocol):
    """Makes matrices of blocks that multiply on this machine."""

    def work(self, encoding: Encoding, *, gated: bool) -> bool:
        """Whether products of an encoding, or gated ones, can be had here and are right; said in the log if not."""
        ...

    def matrix(self, blocks: Stored, bias: torch.Tensor | None) -> InBlocks:
        """A matrix whose outputs are a multiple of 4, each half of them if it is gate and up."""
        ...
