"""Builds the forward batch from a step's inputs, on the device and without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_jax.runner.packing import DRAFT_NUMBER, LENGTH_ON_DEVICE
from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.drafts import DraftedTokens, DraftSequences, KnownTokens
from torch_backend.packing import StepInputs
from torch_backend.recurrent.rows import StateRows


class Model(Protocol):
    """The model as steps use it, with its KV pages."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns hidden states `[T, hidden]`; writes the step's keys and values into the pages."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 `[m, vocab]` for hidden states `[m, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class RowTensors:
    """Tensors that persist between steps, by row. The last row, the dump row, is where padding writes.

    - `page_table`: int32 `[rows + 1, columns]`, the columns of all cache groups one after the other (see
      `TableLayout`); the dump row holds only page 0.
    - `last_tokens`: int32 `[rows + 1]`, the token that each row sampled last.
    - `known`: the rows' texts, if steps have drafts; `drafted`: the draft model's tokens, if there is one.
    """

    page_table: torch.Tensor
    last_tokens: torch.Tensor
    known: KnownTokens | None = None
    drafted: DraftedTokens | None = None

    @classmethod
    def zeros(
        cls,
        rows: int,
        pages: int,
        device: torch.device,
        known: KnownTokens | None = None,
        drafted: DraftedTokens | None = None,
    ) -> RowTensors:
        return cls(
            torch.zeros((rows, pages), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            known,
            drafted,
        )


def settle_drafts(inputs: StepInputs, state: RowTensors, drafts: DraftSequences | None) -> None:
    """Writes the values that only the device knows into `inputs`: the lengths of rows that continue where a step in
    flight ends, and the token of each decoding sequence: its row's last one, or one of the drafts (None for none)."""
    rows, known = inputs.rows.long(), state.known
    assert known is not None, "a runner that drafts"
    length_on_device = inputs.flags % DRAFT_NUMBER == LENGTH_ON_DEVICE
    lengths = known.lengths[rows] + inputs.flags // DRAFT_NUMBER
    inputs.kv_lens.copy_(torch.where(length_on_device, lengths, inputs.kv_lens))
    inputs.own.copy_(state.last_tokens[rows])
    if drafts is not None:
        found = known.propose(drafts) if state.drafted is None else state.drafted.propose(drafts)
        inputs.own.index_copy_(0, drafts.sequences, found)


def build_batch(
    inputs: StepInputs,
    state: RowTensors,
    page_size: int,
    table: TableLayout = ONE_GROUP,
) -> ForwardBatch:
    """Applies the page-table deltas, and computes each token's position and the slot of its keys and values."""
    state.page_table.index_put_((inputs.delta_rows.long(), inputs.delta_columns.long()), inputs.delta_pages)
    rows = inputs.rows.long()
    # A model with only recurrent states has no pages; the zeros are not read.
    tables = [state.page_table[:, first:last][rows] for first, last in table.paged] or [torch.zeros_like(rows)[:, None]]
    sequences = places = rows[:0]
    own_token = state.last_tokens[rows] if state.known is None else inputs.own
    if inputs.num_decode == len(rows):
        tokens = own_token
        positions = (inputs.kv_lens - 1).clamp(min=0)
        columns = (positions // page_size).long()[:, None]
        pages = [own.gather(1, columns if table.paged else columns * 0)[:, 0] for own in tables]
    else:
        count = len(inputs.tokens)
        ends = inputs.query_starts[1:]
        places = torch.arange(count, dtype=torch.int32, device=rows.device)
        sequences = torch.repeat_interleave(ends - inputs.query_starts[:-1], output_size=count)
        tokens = torch.where(inputs.tokens < 0, own_token[sequences], inputs.tokens)
        positions = ((inputs.kv_lens - ends)[sequences] + places).clamp(min=0)
        columns = (positions // page_size).long()
        pages = [own[sequences, columns if table.paged else columns * 0] for own in tables]
    first, *further = [
        GroupPages(page.long() * page_size + positions % page_size, own)
        for page, own in zip(pages, tables, strict=True)
    ]
    states = None
    if table.slots is not None:
        states = _state_rows(inputs, state.page_table[rows, table.slots], sequences, places, table.first_draft_slot)
    return ForwardBatch(
        # A row whose logits were not finite holds no token; its request ends once the host has seen it. A draft without
        # a match holds none either.
        tokens=tokens.clamp(min=0),
        positions=positions,
        write_slots=first.write_slots,
        page_table=first.page_table,
        kv_lens=inputs.kv_lens,
        query_starts=inputs.query_starts,
        num_decode=inputs.num_decode,
        further=tuple(further),
        states=states,
    )


def own_slots(inputs: StepInputs, slots: torch.Tensor, first_draft_slot: int) -> torch.Tensor:
    """Returns the slots for sequences' states, int64 `[R]`: their rows' `slots` `[R]`, or draft slots in order."""
    if not len(inputs.flags):
        return slots.long()
    drafts = inputs.flags >= DRAFT_NUMBER
    return torch.where(drafts, first_draft_slot - 1 + drafts.cumsum(0), slots.long())


def _state_rows(
    inputs: StepInputs, slots: torch.Tensor, sequences: torch.Tensor, places: torch.Tensor, first_draft_slot: int
) -> StateRows:
    # A copy's target is a sequence's own slot: instead of copying the state, the sequence reads the source, at no cost.
    copied = slots[:, None] == inputs.copy_targets
    begin = torch.where(copied.any(1), (copied * inputs.copy_sources).sum(1), slots)
    starts = inputs.query_starts
    return StateRows(
        begin=begin.long(),
        fresh=inputs.kv_lens <= starts.diff(),
        own=own_slots(inputs, slots, first_draft_slot),
        sequences=sequences,
        offsets=places - starts[sequences].long(),
        query_starts=starts,
        num_decode=inputs.num_decode,
        # Steps with prompts have no drafts.
        drafts=(inputs.flags // DRAFT_NUMBER).long() if len(inputs.flags) and inputs.num_decode == len(slots) else None,
    )
