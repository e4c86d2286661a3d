"""Drafts with a second model, on the device: see `sglang_jax.runner.draft_model`.

A draft is sampled like the token that it predicts: with the row's parameters and the noise of its position. Two models
that agree on the probabilities therefore sample the same token at any temperature. (Leviathan et al. 2023 accept drafts
at random; here, a draft is accepted if it equals the sampled token.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_jax.runner.draft_model import in_parts
from sglang_jax.runner.drafts import FlatPlan
from sglang_jax.runner.page_tables import TableLayout
from sglang_jax.runner.plan import DRAFT, INVALID_TOKEN, Int32
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.drafts import DraftedTokens, KnownTokens
from torch_backend.step import Model, RowTensors

Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Samples tokens int32 `[n]` from logits `[n, vocab]`, rows int64 `[n]` and lengths int32 `[n]`."""

_MAX_TOKENS = 512
"""Maximum tokens of a forward pass over tokens that the draft model has missed."""


@dataclass(frozen=True, slots=True)
class WithDraft:
    """A model with its draft model, which also computes each step with chunks. `groups`: the draft model's cache
    groups, by their index among the groups with pages of both models."""

    model: Model
    draft: Model
    groups: tuple[int, ...]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = self.model.forward(batch)
        if not batch.decode_only:
            pages = (GroupPages(batch.write_slots, batch.page_table), *batch.further)
            self.draft.forward(_with_pages(batch, [pages[group] for group in self.groups]))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


def _with_pages(batch: ForwardBatch, pages: Sequence[GroupPages]) -> ForwardBatch:
    first, *further = pages
    return replace(batch, write_slots=first.write_slots, page_table=first.page_table, further=tuple(further))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The drafts that a step needs, on the host: `rows` `[drafting]`, rows with more drafts first, and their `counts`
    of drafts; `late` `[late]`, rows of which the draft model has missed tokens, and `missed` `[late]`, the maximum
    number of those."""

    rows: Int32
    counts: Int32
    late: Int32
    missed: Int32

    @classmethod
    def of(cls, flat: FlatPlan, late: Int32, missed: Int32) -> DraftRequest | None:
        rows, counts = flat.drafting()
        if not len(rows):
            return None
        order = np.argsort(-counts, kind="stable")
        return cls(rows[order], counts[order], late, missed)


class Drafter:
    """Computes drafts with the draft model, which includes its KV pages, on the stream of the steps. `windows`: of its
    cache groups, None for full attention; `rows`: the runner's row tensors; `to_device`: copies integers to the
    device."""

    def __init__(
        self,
        draft: Model,
        windows: tuple[int | None, ...],
        rows: RowTensors,
        table: TableLayout,
        page_size: int,
        to_device: Callable[[Int32], torch.Tensor],
    ) -> None:
        assert rows.known is not None
        assert rows.drafted is not None
        self._draft = draft
        self._windows = windows
        self._page_table = rows.page_table
        self._known: KnownTokens = rows.known
        self._drafted: DraftedTokens = rows.drafted
        self._table = table
        self._page_size = page_size
        self._to_device = to_device

    def propose(self, wanted: DraftRequest, sample: Sample) -> None:
        """Writes the drafts into `DraftedTokens`. The step's page-table deltas must have been applied."""
        for _, *part in in_parts(wanted.late, wanted.missed, (_MAX_TOKENS,)):
            self._compute(*part)
        on_device = self._to_device(np.stack((wanted.rows, wanted.counts)))
        rows, counts = on_device[0].long(), on_device[1]
        lengths = self._known.lengths[rows]
        # The last token but one is computed here if it was missed: see `AT_ONCE`.
        both = rows.repeat(2)
        positions = torch.cat((lengths - 2, lengths - 1)).clamp(min=0)
        write = torch.cat((self._drafted.lengths[rows] < lengths - 1, torch.ones_like(rows, dtype=torch.bool)))
        hidden = self._decode(both, positions, self._known.tokens[both, positions.long()], write)[len(rows) :]
        for number in range(int(wanted.counts[0])):
            own = int(np.count_nonzero(wanted.counts > number))
            rows, kv_lens = rows[:own], lengths[:own] + number
            if number:
                before = self._drafted.tokens[rows, number - 1]
                hidden = self._decode(rows, kv_lens - 1, before, None)
            tokens = sample(self._draft.logits(hidden), rows, kv_lens)
            self._drafted.tokens[rows, number] = torch.where(tokens == INVALID_TOKEN, DRAFT, tokens)
        self._drafted.lengths.index_copy_(0, on_device[0].long(), lengths + counts - 1)

    def _decode(
        self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, write: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of `tokens` at `positions` of `rows`, `[n]` all; `write`: those whose keys are stored, None for
        all."""
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        return self._forward(rows, rows, positions, tokens, positions + 1, starts, len(rows), write)

    def _forward(
        self,
        rows: torch.Tensor,
        row_of_token: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        kv_lens: torch.Tensor,
        query_starts: torch.Tensor,
        num_decode: int,
        write: torch.Tensor | None,
    ) -> torch.Tensor:
        columns = (positions // self._page_size).long()
        pages = []
        tables = [self._page_table[:, slice(*self._table.paged[group])] for group in self._table.draft]
        for table, window in zip(tables, self._windows, strict=True):
            slots = table[row_of_token, columns].long() * self._page_size + positions % self._page_size
            if window is not None:  # pages before the window may belong to other rows by now
                slots = torch.where(positions >= self._known.lengths[row_of_token] - window, slots, 0)
            pages.append(GroupPages(slots if write is None else torch.where(write, slots, 0), table[rows]))
        first, *further = pages
        batch = ForwardBatch(
            tokens=tokens.clamp(min=0),
            positions=positions,
            write_slots=first.write_slots,
            page_table=first.page_table,
            kv_lens=kv_lens,
            query_starts=query_starts,
            num_decode=num_decode,
            further=tuple(further),
        )
        return self._draft.forward(batch)

    def _compute(self, rows: Int32, backs: Int32, counts: Int32) -> None:
        """Computes `counts` tokens of each of `rows`, up to `backs` before the end of the row's text. Keys that are
        stored already are read but not written again, because other rows may share their pages."""
        ends = np.cumsum(counts)
        sequences = np.repeat(np.arange(len(rows)), counts)
        back_of_token = np.repeat(ends + backs, counts) - np.arange(ends[-1])
        together = np.concatenate((rows, backs, [0], ends, rows[sequences], back_of_token)).astype(np.int32)
        on_device = self._to_device(together)
        number, total = len(rows), int(ends[-1])
        row_ids, back, starts, row_of_token, token_back = torch.split(
            on_device, [number, number, number + 1, total, total]
        )
        row_ids, row_of_token = row_ids.long(), row_of_token.long()
        kv_lens = self._known.lengths[row_ids] - back
        positions = (self._known.lengths[row_of_token] - token_back).clamp(min=0)
        tokens = self._known.tokens[row_of_token, positions.long()]
        write = positions >= self._drafted.lengths[row_of_token]
        self._forward(row_ids, row_of_token, positions, tokens, kv_lens, starts, 0, write)
        self._drafted.lengths.index_copy_(0, row_ids, torch.maximum(self._drafted.lengths[row_ids], kv_lens))

    def warm_up(self, dump_row: int, sample: Sample) -> None:
        """Runs the kernels of drafting once, in the dump row."""
        one = np.array([1], np.int32)
        self._known.lengths[dump_row] = 4
        self.propose(DraftRequest(dump_row * one, 2 * one, dump_row * one, 2 * one), sample)
        self._known.lengths[dump_row] = self._drafted.lengths[dump_row] = 0
