"""Packs a plan's integers into one int32 array, for one transfer per step to the device, and unpacks it there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from sglang_jax.runner.page_tables import pack_copies
from sglang_jax.runner.plan import Int32, PageDeltas, StepPlan

LENGTH_ON_DEVICE, DRAFT_NUMBER = 1, 2
"""Flags of a sequence: bit `LENGTH_ON_DEVICE`, plus `DRAFT_NUMBER` times the draft's index in its row, from 1."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan on the device: R sequences, D page-table deltas, views of one int32 tensor.

    - `num_decode`: sequences with one token, with padding; known to the host.
    - `rows`, `kv_lens`: `[R]`; padding is in the dump row with length 0, after the decode rows and after the others.
    - `query_starts`: `[R + 1]`. Tokens of padding belong to the last sequence, which is padding then.
    - `sampled`: `[S]`, the sequences that sample a token.
    - `delta_rows`, `delta_columns`, `delta_pages`: `[D]`; padding writes page 0 into the dump row.
    - `tokens`: `[T]`, as in the plan; empty in a decode step, where each row has its own last token.
    - `flags`: `[R]` for a runner that drafts, else empty; see `LENGTH_ON_DEVICE`, `DRAFT_NUMBER`.
    - `own`: `[R]` or empty as `flags`, the token of each sequence that decodes. `settle_drafts` writes it, and the
      lengths that only the device knows.
    - `copy_sources`, `copy_targets`: `[R]`, state slots with which sequences start, and their own slots that these
      replace; targets are -1 for no copy. Empty for a model without states.
    """

    num_decode: int
    rows: torch.Tensor
    kv_lens: torch.Tensor
    query_starts: torch.Tensor
    sampled: torch.Tensor
    delta_rows: torch.Tensor
    delta_columns: torch.Tensor
    delta_pages: torch.Tensor
    tokens: torch.Tensor
    flags: torch.Tensor
    own: torch.Tensor
    copy_sources: torch.Tensor
    copy_targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sizes of the fields of a packed step: of its plan for an eager step, of its bucket for a captured one. `drafts`:
    the runner drafts; `states`: the model has recurrent states."""

    rows: int
    sampled: int
    deltas: int
    tokens: int
    num_decode: int
    drafts: bool = False
    states: bool = False

    @classmethod
    def exact(cls, plan: StepPlan, deltas: PageDeltas, *, drafts: bool = False, states: bool = False) -> StepLayout:
        """The layout without padding; `deltas`: the plan's deltas of all groups."""
        return cls(
            rows=len(plan.rows),
            sampled=int(np.count_nonzero(plan.samples)),
            deltas=len(deltas.rows),
            tokens=0 if plan.num_decode == len(plan.rows) else plan.num_tokens,
            num_decode=plan.num_decode,
            drafts=drafts,
            states=states,
        )

    @classmethod
    def decode(cls, rows: int, deltas: int, *, drafts: bool = False, states: bool = False) -> StepLayout:
        """The layout of a decode step, in which all rows sample."""
        return cls(
            rows=rows,
            sampled=rows,
            deltas=deltas,
            tokens=0,
            num_decode=rows,
            drafts=drafts,
            states=states,
        )

    @classmethod
    def mixed(cls, decode: int, chunks: int, prompt_tokens: int, deltas: int, *, states: bool = False) -> StepLayout:
        """The layout of `decode` rows and `prompt_tokens` of fewer than `chunks` other sequences, then padding."""
        return cls(
            rows=decode + chunks,
            sampled=decode + chunks,
            deltas=deltas,
            tokens=decode + prompt_tokens,
            num_decode=decode,
            states=states,
        )

    @property
    def size(self) -> int:
        """Size of the packed step in int32 words."""
        return self._ends()[-1]

    def unpack(self, packed: torch.Tensor) -> StepInputs:
        """Returns views of a packed step on the device."""
        return StepInputs(self.num_decode, *(packed[start:end] for start, end in pairwise(self._ends())))

    def pack(
        self, plan: StepPlan, deltas: PageDeltas, dump_row: int, packed: Int32, draft_numbers: Int32 | None = None
    ) -> None:
        """Writes a plan that fits into `packed`, `[size]`, with page `deltas`; `draft_numbers`: as in `FlatPlan`."""
        fields = [packed[start:end] for start, end in pairwise(self._ends())]
        rows, kv_lens, query_starts, sampled, delta_rows, delta_columns, delta_pages, tokens, *others = fields
        flags, own, *copied = others
        decoding, entries = plan.num_decode, len(deltas.rows)
        places = np.arange(len(plan.rows))
        places[decoding:] += self.num_decode - decoding
        rows[:] = dump_row
        rows[places] = plan.rows
        kv_lens[:] = 0
        kv_lens[places] = plan.kv_lens
        lengths = np.zeros(self.rows, np.int32)
        lengths[: self.num_decode] = 1
        lengths[places] = plan.query_lens
        if self.tokens:
            lengths[-1] += self.tokens - lengths.sum()
        query_starts[0] = 0
        np.cumsum(lengths, out=query_starts[1:])
        sampling = places[plan.samples]
        sampled[: len(sampling)] = sampling
        sampled[len(sampling) :] = np.arange(len(sampling), self.sampled)
        delta_rows[:entries] = deltas.rows
        delta_rows[entries:] = dump_row
        delta_columns[:entries] = deltas.columns
        delta_columns[entries:] = 0
        delta_pages[:entries] = deltas.pages
        delta_pages[entries:] = 0
        if self.tokens:
            prompts = plan.tokens[decoding:]
            tokens[:] = 0
            tokens[:decoding] = plan.tokens[:decoding]
            tokens[self.num_decode : self.num_decode + len(prompts)] = prompts
        if self.drafts:
            flags[:] = own[:] = 0
            if plan.length_on_device is not None:
                flags[places] = LENGTH_ON_DEVICE * plan.length_on_device
            if draft_numbers is not None:
                flags[places] += DRAFT_NUMBER * draft_numbers
        pack_copies(plan.copies, *copied)

    def _ends(self) -> list[int]:
        rows, deltas = self.rows, self.deltas
        draft_entries, copies = rows if self.drafts else 0, rows if self.states else 0
        of_step = (rows, rows, rows + 1, self.sampled, deltas, deltas, deltas, self.tokens)
        lengths = (*of_step, draft_entries, draft_entries, copies, copies)
        return list(accumulate(lengths, initial=0))
