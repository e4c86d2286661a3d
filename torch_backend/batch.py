"""The inputs of one forward pass, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from torch_backend.recurrent.rows import StateRows


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The slots and pages of a step's tokens in one cache group: see `ForwardBatch`."""

    write_slots: torch.Tensor
    page_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of one step, their sequences, and the pages of their keys and values.

    T tokens, R sequences, P page-table columns. Sequence s has the tokens `query_starts[s] : query_starts[s + 1]`, the
    last ones of its `kv_lens[s]` keys. The first `num_decode` sequences have exactly one token each, so token i belongs
    to sequence i; if `num_decode == R` (a decode step), all sequences do. Captured steps have sequences of padding
    (`kv_lens` is 0): with one token each among the first `num_decode`, with any number or none after them.

    - `tokens`: int32 `[T]`. `positions`: int32 `[T]`, 0 for padding.
    - `write_slots`: int64 `[T]`, `page * page_size + offset`; padding writes to page 0.
    - `page_table`: int32 `[R, P]`, 0 where unused. For layers with a window, entries before it are undefined.
    - `kv_lens`: int32 `[R]`, length after this step's writes; 0 for padding. `query_starts`: int32 `[R + 1]`.
    - `num_decode`: known to the host, fixed in a captured step.
    - `further`: pages of the cache groups after the first, which has `write_slots` and `page_table`; not of state
      groups.
    - `states`: the slots of the sequences' states, if the model has recurrent states.
    - `causal`: tokens see keys up to their own. Otherwise they see all of their sequence, which has no keys of earlier
      steps.
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
    causal: bool = True

    def of_group(self, group: int) -> ForwardBatch:
        if group == 0:
            return self
        pages = self.further[group - 1]
        return replace(self, write_slots=pages.write_slots, page_table=pages.page_table, further=())

    def as_causal(self) -> ForwardBatch:
        """The batch for kernels of causal attention: if it is not causal, each token is a sequence, which sees all keys
        of its text. These are written before."""
        if self.causal:
            return self
        count = len(self.tokens)
        sequences = torch.repeat_interleave(self.query_starts.diff(), output_size=count)
        return replace(
            self,
            page_table=self.page_table[sequences],
            kv_lens=self.kv_lens[sequences],
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=self.tokens.device),
            num_decode=count,
            causal=True,
        )

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has one token."""
        return self.num_decode == self.kv_lens.shape[0]
