"""What one forward step computes, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_backend.recurrent.rows import StateRows


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Where the tokens of a step lie in the pages of one cache group: see `ForwardBatch`."""

    write_slots: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of one step, the sequences they belong to, and where their keys and values lie.

    T tokens, R sequences, P page-table columns. Sequence s holds the tokens `query_starts[s] : query_starts[s + 1]`,
    which are the last ones of its `kv_lens[s]` keys. The first `num_decode` sequences have exactly one token each, so
    that token i belongs to sequence i; where `num_decode == R` (a decode step) every sequence does. Captured steps are
    padded: with sequences without keys (`kv_lens` is 0), of one token among the first `num_decode`, of any number or
    none behind them.

    - `tokens`: int32 `[T]`.
    - `positions`: int32 `[T]`, 0 for padding.
    - `write_slots`: int64 `[T]`, `page * page_size + offset`; padding writes into page 0.
    - `page_table`: int32 `[R, P]`, 0 where unused. Of layers with a window, entries before it may name any page.
    - `kv_lens`: int32 `[R]`, length after this step's writes; 0 for padding.
    - `query_starts`: int32 `[R + 1]`.
    - `num_decode`: known to the host, fixed in a captured step.
    - `further`: pages of the cache groups after the first, whose are `write_slots` and `page_table`. Groups that keep
      states are not among them.
    - `states`: of a model that keeps states, where its sequences have them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    num_decode: int
    further: tuple[GroupPages, ...] = ()
    states: StateRows | None = None

    def of_group(self, group: int) -> ForwardBatch:
        """The batch as layers of one cache group see it."""
        if group == 0:
            return self
        pages = self.further[group - 1]
        return replace(self, write_slots=pages.write_slots, page_table=pages.page_table, further=())

    @property
    def decode_only(self) -> bool:
        """Every sequence has one token."""
        return self.num_decode == self.kv_lens.shape[0]
