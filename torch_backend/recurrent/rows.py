"""Which states the sequences of a step begin with, and where they leave their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    - `drafts`: int64 `[R]`, given for decode steps of runners that draft: which of its row's drafts a sequence stands
      for, 0 for none. A draft stands behind the sequence before it, goes on from the state that this one leaves, and
      has a slot of its own to leave one; its `begin` is what the first sequence of its row begins with.
    """

    begin: torch.Tensor
    fresh: torch.Tensor
    own: torch.Tensor
    sequences: torch.Tensor
    offsets: torch.Tensor
    query_starts: torch.Tensor
    num_decode: int
    drafts: torch.Tensor | None = None

    @property
    def decode_only(self) -> bool:
        """Every sequence has one token: token i belongs to sequence i."""
        return self.num_decode == len(self.own)

    @cached_property
    def starts(self) -> list[int]:
        """`query_starts` on the host, which waits for the device; once for all layers."""
        found: list[int] = self.query_starts.tolist()
        return found

    @cached_property
    def depths(self) -> list[torch.Tensor]:
        """The sequences that stand for no draft, for a first one of their row, for a second one, and so on: int64 each.
        Waits for the device; once for all layers."""
        if self.drafts is None:
            return [torch.arange(len(self.own), device=self.own.device)]
        return [(self.drafts == depth).nonzero()[:, 0] for depth in range(int(self.drafts.max()) + 1)]

    @cached_property
    def runs(self) -> torch.Tensor | None:
        """How many sequences from each one on are its row's, where it is the first of them, else 0: int64 `[R]`. None
        where steps have no drafts. Nothing is read on the host."""
        if self.drafts is None:
            return None
        places = torch.arange(len(self.drafts), device=self.drafts.device)
        firsts = places - self.drafts
        return torch.zeros_like(self.drafts).index_add_(0, firsts, torch.ones_like(firsts))

    def of(self, sequences: torch.Tensor) -> StateRows:
        """Those sequences of a decode step alone, int64 `[n]`; that stand for drafts, they begin where the ones before
        them have left their states."""
        begin, fresh = self.begin[sequences], self.fresh[sequences]
        if self.drafts is not None and len(sequences):
            goes_on = self.drafts[sequences] > 0
            begin = torch.where(goes_on, self.own[sequences - 1], begin)
            fresh = fresh & ~goes_on
        return replace(self, begin=begin, fresh=fresh, own=self.own[sequences], num_decode=len(sequences), drafts=None)

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """What the sequences begin with, `[R, ...]` of `pool` `[slots, ...]`; zeros where that is nothing."""
        fresh = self.fresh.view(-1, *[1] * (pool.dim() - 1))
        return pool[self.begin].masked_fill_(fresh, 0)

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        """Leaves states in the pool."""
        pool.index_put_((self.own,), states.to(pool.dtype))
