"""From a step's inputs to the forward batch, on the device and without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.drafts import DraftedTokens, Guesses, KnownTokens
from torch_backend.packing import GUESS, LEARNT, StepInputs
from torch_backend.recurrent.rows import StateRows


class Model(Protocol):
    """What a step asks of a model; it owns its KV pages."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states `[T, hidden]`; writes the step's keys and values into the pages."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[m, vocab]` of hidden states `[m, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class RowTensors:
    """What steps keep for each row. One row more than the runner offers, the dump row, takes what padding writes.

    - `page_table`: int32 `[rows + 1, columns]`, those of all cache groups side by side (see `TableLayout`); the dump
      row holds page 0 alone.
    - `last_tokens`: int32 `[rows + 1]`, what each row sampled last.
    - `known`: the rows' texts, where steps have drafts; `drafted`: what a draft model has guessed, where there is one.
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
        """For `rows` rows, the dump row included."""
        return cls(
            torch.zeros((rows, pages), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            known,
            drafted,
        )


def settle_drafts(inputs: StepInputs, state: RowTensors, guesses: Guesses | None) -> None:
    """Writes what only the device knows to `inputs`: how long rows are that go on where a step in flight ends, and the
    token of each sequence that decodes, which its row sampled last, or which is guessed (None: there are none)."""
    rows, known = inputs.rows.long(), state.known
    assert known is not None, "a runner that drafts"
    learnt = inputs.flags % GUESS == LEARNT
    lengths = known.lengths[rows] + inputs.flags // GUESS
    inputs.kv_lens.copy_(torch.where(learnt, lengths, inputs.kv_lens))
    inputs.own.copy_(state.last_tokens[rows])
    if guesses is not None:
        found = known.guess(guesses) if state.drafted is None else state.drafted.guess(guesses)
        inputs.own.index_copy_(0, guesses.sequences, found)


def build_batch(
    inputs: StepInputs,
    state: RowTensors,
    page_size: int,
    table: TableLayout = ONE_GROUP,
) -> ForwardBatch:
    """Applies the page-table deltas, and says where each token stands and which slots its KV goes to."""
    state.page_table.index_put_((inputs.delta_rows.long(), inputs.delta_columns.long()), inputs.delta_pages)
    rows = inputs.rows.long()
    # Where layers keep states alone there are no pages, and nobody looks at any.
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
        # A row whose logits were not finite holds no token; its request ends once the host has seen it. Nor has a
        # draft one for which there is nothing to guess by.
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
    """Where the sequences leave their states, int64 `[R]`: in the `slots` `[R]` of their rows, and behind drafts in
    those that are there for drafts, one after the other."""
    if not len(inputs.flags):
        return slots.long()
    drafts = inputs.flags >= GUESS
    return torch.where(drafts, first_draft_slot - 1 + drafts.cumsum(0), slots.long())


def _state_rows(
    inputs: StepInputs, slots: torch.Tensor, sequences: torch.Tensor, places: torch.Tensor, first_draft_slot: int
) -> StateRows:
    """Where the sequences have their states; `slots` `[R]` are their rows'."""
    # Targets are slots of the sequences' own. To begin with the source costs nothing, in the place of a copy.
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
        # There are none beside prompts.
        drafts=(inputs.flags // GUESS).long() if len(inputs.flags) and inputs.num_decode == len(slots) else None,
    )
