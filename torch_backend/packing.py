"""Packs a plan's integers into one int32 array, for one transfer per step to the device, and unpacks it there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_jax.runner.packing import PlanFields, field_places, flags_of, write_plan
from sglang_jax.runner.plan import Int32, PageDeltas, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs(PlanFields[torch.Tensor]):
    """A plan on the device, as views of one int32 tensor. Padding is after the decode rows, one token each, and after
    the others: its last sequence has all tokens of padding. `flags` is empty if the runner does not draft.

    - `own`: `[R]` or empty as `flags`, the token of each sequence that decodes. `settle_drafts` writes it, and the
      lengths that only the device knows.
    - `sampled`: `[S]`, the sequences that sample a token.
    - `num_decode`: sequences with one token, with padding; known to the host.
    """

    own: torch.Tensor
    sampled: torch.Tensor
    num_decode: int = field(kw_only=True)


@dataclass(slots=True)
class StepLayout:
    """Sizes of the fields of a packed step: of its plan for an eager step, of its bucket for a captured one. `drafts`:
    the runner drafts; `states`: the model has recurrent states; `size`: of the whole, in int32 words."""

    rows: int
    sampled: int
    deltas: int
    tokens: int
    num_decode: int
    drafts: bool = False
    states: bool = False
    size: int = field(init=False)
    _places: list[slice] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = self.rows if self.drafts else 0
        self._places = field_places(
            self.rows, self.deltas, self.tokens, own, self.sampled, states=self.states, flags=self.drafts
        )
        self.size = self._places[-1].stop

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
        return cls(rows, sampled=rows, deltas=deltas, tokens=0, num_decode=rows, drafts=drafts, states=states)

    @classmethod
    def mixed(cls, decode: int, chunks: int, prompt_tokens: int, deltas: int, *, states: bool = False) -> StepLayout:
        """The layout of `decode` rows and `prompt_tokens` of fewer than `chunks` other sequences, then padding."""
        rows = decode + chunks
        return cls(rows, sampled=rows, deltas=deltas, tokens=decode + prompt_tokens, num_decode=decode, states=states)

    def unpack(self, packed: torch.Tensor) -> StepInputs:
        """Returns views of a packed step on the device."""
        return StepInputs(*(packed[place] for place in self._places), num_decode=self.num_decode)

    def pack(
        self, plan: StepPlan, deltas: PageDeltas, dump_row: int, packed: Int32, draft_numbers: Int32 | None = None
    ) -> None:
        """Writes a plan that fits into `packed`, `[size]`, with page `deltas`; `draft_numbers`: as in `FlatPlan`."""
        packed.fill(0)
        *fields, _, sampled = [packed[place] for place in self._places]
        flags = flags_of(plan, None, draft_numbers) if self.drafts else None
        places = write_plan(fields, plan, deltas, dump_row, self.num_decode, flags, padded_tokens=True)
        sampling = np.arange(self.rows)[places][plan.samples]
        sampled[: len(sampling)] = sampling
        sampled[len(sampling) :] = np.arange(len(sampling), self.sampled)
