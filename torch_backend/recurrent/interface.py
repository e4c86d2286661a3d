"""What recurrent layers do with the states of a step's sequences: one signature, several implementations."""

from __future__ import annotations

from typing import Protocol

import torch

from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs


class StepStates(Protocol):
    """The states of one step, for every layer. What slots hold that no sequence begins with does not matter, NaN
    included; what slot 0 holds afterwards neither."""

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        """See `recurrent.convolution`; leaves the last inputs in the pool.

        **Arguments:** `x` `[T, channels]`, rounded to the type of `pool` first; `weight` `[channels, width]`; `bias`
        `[channels]`; `pool` `[slots, width - 1, channels]`, the oldest input first.

        **Returns:** float32 `[T, channels]`.
        """
        ...

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        """See `recurrent.scan`; leaves the matrices in the pool.

        **Arguments:** `pool` `[slots, heads, key_dim, value_dim]`, float32 or bfloat16, in which they are rounded once
        a step.

        **Returns:** float32 `[T, heads, value_dim]`.
        """
        ...


class StateImplementation(Protocol):
    """Prepares once for each step what all its layers share."""

    @property
    def reads_lengths(self) -> bool:
        """Steps with chunks wait for their lengths to come to the host, so that they cannot be captured."""
        ...

    def prepare(self, rows: StateRows) -> StepStates:
        """The states of the step whose sequences are `rows`."""
        ...
