"""The state slots that the sequences of a step read and write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

States = tuple[torch.Tensor, ...]
"""A layer's pools, `[slots, ...]` each, in the order of its config's `state`."""


@dataclass(frozen=True)
class StateRows:
    """State slots of a step of T tokens in R sequences, whose tokens are those of its `ForwardBatch`.

    - `begin`: int64 `[R]`, the slot with the state before a sequence's first token; `fresh`: bool `[R]`, there is no
      state yet, whatever the slot holds.
    - `own`: int64 `[R]`, the slot for the state after its last token; 0 for padding. No other sequence starts from it.
    - `sequences`, `offsets`: int64 `[T]`, the sequence of a token, and the number of its tokens in the step before this
      one. Not read in a decode step.
    - `query_starts`, `num_decode`: as in `ForwardBatch`.
    - `drafts`: int64 `[R]`, for decode steps of runners that draft: the index of a sequence's draft in its row from 1,
      or 0. A draft follows the sequence before it, continues from its state, and has its own slot for its state; its
      `begin` is that of the first sequence of its row.
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
        """Whether every sequence has one token: token i belongs to sequence i."""
        return self.num_decode == len(self.own)

    @cached_property
    def starts(self) -> list[int]:
        """`query_starts` on the host, which waits for the device; once for all layers."""
        found: list[int] = self.query_starts.tolist()
        return found

    @cached_property
    def depths(self) -> list[torch.Tensor]:
        """The sequences that are not drafts, those that are the first draft of their row, the second, and so on: int64
        each. Waits for the device; once for all layers."""
        if self.drafts is None:
            return [torch.arange(len(self.own), device=self.own.device)]
        return [(self.drafts == depth).nonzero()[:, 0] for depth in range(int(self.drafts.max()) + 1)]

    @cached_property
    def runs(self) -> torch.Tensor | None:
        """For the first sequence of each row, the number of its row's sequences, else 0: int64 `[R]`. None if steps
        have no drafts. Nothing is read on the host."""
        if self.drafts is None:
            return None
        places = torch.arange(len(self.drafts), device=self.drafts.device)
        firsts = places - self.drafts
        return torch.zeros_like(self.drafts).index_add_(0, firsts, torch.ones_like(firsts))

    def of(self, sequences: torch.Tensor) -> StateRows:
        """Selects sequences of a decode step, int64 `[n]`; drafts start from the sequences before them."""
        begin, fresh = self.begin[sequences], self.fresh[sequences]
        if self.drafts is not None and len(sequences):
            continues = self.drafts[sequences] > 0
            begin = torch.where(continues, self.own[sequences - 1], begin)
            fresh = fresh & ~continues
        return replace(self, begin=begin, fresh=fresh, own=self.own[sequences], num_decode=len(sequences), drafts=None)

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """The states with which sequences start, `[R, ...]` of `pool` `[slots, ...]`; zeros for fresh ones."""
        fresh = self.fresh.view(-1, *[1] * (pool.dim() - 1))
        return pool[self.begin].masked_fill_(fresh, 0)

    def write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        pool.index_put_((self.own,), states.to(pool.dtype))
