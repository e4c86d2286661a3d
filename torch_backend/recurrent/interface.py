"""The states of a step's sequences, as recurrent layers use them: the interface of all implementations."""

from __future__ import annotations

from typing import Protocol

import torch

from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs


class StepStates(Protocol):
    """The states of one step, for all layers. Unread slots may hold NaN; slot 0 is undefined afterwards."""

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        """See `native.convolve`; writes the last inputs to the pool, and returns float32 `[T, channels]`. `x`
        `[T, channels]`, first rounded to the dtype of `pool`; `weight` `[channels, width]`; `bias` `[channels]`; `pool`
        `[slots, width - 1, channels]`, the oldest input first."""
        ...

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        """See `recurrent.scan`; writes the matrices to the pool, and returns float32 `[T, heads, value_dim]`. `pool`
        `[slots, heads, key_dim, value_dim]`, float32 or bfloat16 (rounded once a step)."""
        ...


class StateImplementation(Protocol):
    """Prepares once per step what all its layers share."""

    @property
    def reads_lengths(self) -> bool:
        """Whether steps with chunks wait for their lengths on the host, so that they cannot be captured."""
        ...

    def prepare(self, rows: StateRows) -> StepStates: ...
