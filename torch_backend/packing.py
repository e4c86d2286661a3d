"""A plan's integers as one int32 array, so that a step costs one transfer to the device; and back on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from sglang_jax.runner.page_tables import pack_copies
from sglang_jax.runner.plan import Int32, PageDeltas, StepPlan

LEARNT, GUESS = 1, 2
"""What the flags of a sequence are made of: a bit, and from `GUESS` on the number of the draft that it stands for."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan on the device: R sequences, D page-table deltas, views of one int32 tensor.

    - `num_decode`: known to the host; those that are padding count too.
    - `rows`, `kv_lens`: `[R]`; padding is in the dump row, with length 0. It stands behind the sequences that decode,
      and behind those that do not.
    - `query_starts`: `[R + 1]`. Tokens that are padding belong to the last sequence, which is no other's then.
    - `sampled`: `[S]`, the sequences that sample a token.
    - `delta_rows`, `delta_columns`, `delta_pages`: `[D]`; padding writes page 0 into the dump row.
    - `tokens`: `[T]`, as in the plan; empty in a step of decode rows alone, each of which has its own token.
    - `flags`: `[R]` for a runner that drafts, else empty; see `LEARNT`, `GUESS`. `own`: likewise, the token that each
      sequence computes that decodes, which `settle_drafts` writes, as it does the lengths that only the device knows.
    - `copy_sources`, `copy_targets`: `[R]`, slots that sequences begin with, and those of their own in whose place
      they do; targets are -1 where there is none. Empty for a model that keeps no states.
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
    """Sizes of the fields of a packed step. An eager step has those of its plan, a captured one those of its bucket.
    `drafts`: of a runner that drafts; `states`: the model keeps some."""

    rows: int
    sampled: int
    deltas: int
    tokens: int
    num_decode: int
    drafts: bool = False
    states: bool = False

    @classmethod
    def exact(cls, plan: StepPlan, deltas: PageDeltas, *, drafts: bool = False, states: bool = False) -> StepLayout:
        """Without any padding; `deltas`: those of the plan, of all groups."""
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
        """Of decode rows alone, which all sample."""
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
        """Of `decode` rows that do, and `prompt_tokens` tokens of fewer than `chunks` sequences: the last one is
        padding."""
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
        """int32 words of the packed step."""
        return self._ends()[-1]

    def unpack(self, packed: torch.Tensor) -> StepInputs:
        """Views of a packed step on the device."""
        return StepInputs(self.num_decode, *(packed[start:end] for start, end in pairwise(self._ends())))

    def pack(
        self, plan: StepPlan, deltas: PageDeltas, dump_row: int, packed: Int32, guesses: Int32 | None = None
    ) -> None:
        """Writes a plan that fits into `packed`, `[size]`; `deltas` are those of its page deltas that go along;
        `guesses` as `Unfolded` has them."""
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
        who = places[plan.samples]
        sampled[: len(who)] = who
        sampled[len(who) :] = np.arange(len(who), self.sampled)
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
            if plan.learnt is not None:
                flags[places] = LEARNT * plan.learnt
            if guesses is not None:
                flags[places] += GUESS * guesses
        pack_copies(plan.copies, *copied)

    def _ends(self) -> list[int]:
        rows, deltas = self.rows, self.deltas
        guessed, copies = rows if self.drafts else 0, rows if self.states else 0
        of_step = (rows, rows, rows + 1, self.sampled, deltas, deltas, deltas, self.tokens)
        lengths = (*of_step, guessed, guessed, copies, copies)
        return list(accumulate(lengths, initial=0))
