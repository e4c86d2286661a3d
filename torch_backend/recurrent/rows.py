"""Which states the sequences of a step begin with, and where they leave their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

States = tuple[torch.Tensor, ...]
"""A layer's pools, `[slots, ...]` each, in the order of its config's `state`."""


@dataclass(frozen=True)
class StateRows:
    """Of a step of T tokens in R sequences, whose tokens are those of its `ForwardBatch`.

    - `begin`: int64 `[R]`, the slot with the state before a sequence's first token; `fresh`: bool `[R]`, there is none,
      whatever the slot holds.
    - `own`: int64 `[R]`, the slot that takes the state after its last token; slot 0 for padding. No other sequence of
      the step begins with it.
    - `sequences`, `offsets`: int64 `[T]`, the sequence that a token belongs to, and how many tokens of the step it has
      before that one. Not looked at in a decode step.
    - `query_starts`, `num_decode`: as in `ForwardBatch`.
    """

    begin: torch.Tensor
    fresh: torch.Tensor
    own: torch.Tensor
    sequences: torch.Tensor
    offsets: torch.Tensor
    query_starts: torch.Tensor
    num_decode: int

    @property
    def decode_only(self) -> bool:
        """Every sequence has one token: token i belongs to sequence i."""
        return self.num_decode == len(self.own)

    @cached_property
    def starts(self) -> list[int]:
        """`query_starts` on the host, which waits for the device; once for all layers."""
        found: list[int] = self.query_starts.tolist()
        return found

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """What the sequences begin with, `[R, ...]` of `pool` `[slots, ...]`; zeros where that is nothing."""
        fresh = self.fresh.view(-1, *[1] * (pool.dim() - 1))
        return pool[self.begin].masked_fill_(fresh, 0)

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        """Leaves states in the pool."""
        pool.index_put_((self.own,), states.to(pool.dtype))
