"""Drafts on the device: proposes the next tokens of rows, and finds which sampled tokens follow accepted drafts.

Drafts come from a draft model (`draft_model.py`), or from an earlier occurrence of the end of a row's text: prompt
lookup decoding (Saxena 2023), whose drafts are accepted where a text repeats itself, as in edited code or quotations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_jax.runner.drafts import LONGEST_MATCH, REJECTED, SHORTEST_MATCH, FlatPlan
from sglang_jax.runner.plan import DRAFT, HINT_TOKENS, Int32


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The text of every row of a runner that drafts, on the device, in int32.

    - `tokens` `[rows + 1, max_context + 1]`: prompt and output; undefined after the row's length.
    - `lengths` `[rows + 1]`: tokens of each row that has sampled; the last token is not computed yet.
    - `hints` `[rows + 1, HINT_TOKENS]`: passages of other texts to search as well, padded with `DRAFT`.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    hints: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, max_context: int, device: torch.device) -> KnownTokens:
        return cls(
            torch.zeros((rows, max_context + 1), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.full((rows, HINT_TOKENS), DRAFT, dtype=torch.int32, device=device),
        )

    @property
    def dump_row(self) -> int:
        return len(self.lengths) - 1

    def replace(self, packed: torch.Tensor) -> None:
        """Replaces the texts of rows: `packed` int32 `[n, 2 + width]`, see `pack_texts`."""
        rows = packed[:, 0].long()
        self.tokens[:, : packed.shape[1] - 2].index_copy_(0, rows, packed[:, 2:])
        self.lengths.index_copy_(0, rows, packed[:, 1].contiguous())
        self.hints.index_fill_(0, rows, DRAFT)

    def hint(self, packed: torch.Tensor) -> None:
        """Replaces the hints of rows: `packed` int32 `[n, 1 + HINT_TOKENS]`, see `pack_hints`."""
        self.hints.index_copy_(0, packed[:, 0].long(), packed[:, 1:].contiguous())

    def append(
        self, rows: torch.Tensor, kv_lens: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Appends the `kept` of `tokens` at positions `kv_lens` of `rows` int64, all `[n]`; `last`: a row's last kept
        one."""
        columns = kv_lens.clamp(max=self.tokens.shape[1] - 1).long()
        self.tokens.index_put_((torch.where(kept, rows, self.dump_row), columns), tokens)
        self.lengths.index_copy_(0, torch.where(last, rows, self.dump_row), kv_lens + 1)

    def propose(self, drafts: DraftSequences) -> torch.Tensor:
        """Proposes the next tokens: int32 `[drafts]`, `DRAFT` where there is no match to draft from. A draft copies the
        tokens after the longest match of the text's end, the latest one of equals; a hint's match counts only if it is
        longer. Where the text runs out, it is assumed to repeat."""
        of_text = min(drafts.longest, self.tokens.shape[1])  # the columns behind them are the hint's
        tokens = torch.cat((self.tokens[drafts.rows, :of_text], self.hints[drafts.rows]), 1)
        width = tokens.shape[1]
        last = self.lengths[drafts.rows].long()[:, None] - 1
        columns = torch.arange(width, device=tokens.device)
        in_hint = columns >= of_text
        since_begin = torch.where(in_hint, columns - of_text, columns)
        matching = in_hint | (columns < last)
        matched = torch.zeros_like(tokens)
        for back in range(LONGEST_MATCH):
            wanted = tokens.gather(1, (last - back).clamp(min=0))
            matching = matching & (tokens.roll(back, 1) == wanted) & (since_begin >= back) & (last >= back)
            matched += matching
        later = torch.where(in_hint, since_begin, columns + HINT_TOKENS)
        best, place = torch.where(matched >= SHORTEST_MATCH, matched.long() * width + later, -1).max(dim=1)
        own = drafts.owners
        ahead = drafts.numbers - 1
        ahead = torch.where(place[own] < of_text, ahead % (last[:, 0] - place).clamp(min=1)[own], ahead)
        found = place[own] + 1 + ahead
        known = (best[own] >= 0) & (found < width)
        return torch.where(known, tokens[own, found.clamp(max=width - 1)], DRAFT)


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The draft model's drafts for the current step, int32 `[rows + 1, drafts]`, `DRAFT` for none; and the length of
    each row's prefix that it has computed, int32 `[rows + 1]`."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, drafts: int, device: torch.device) -> DraftedTokens:
        return cls(
            torch.full((rows, drafts), DRAFT, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def computed_with(self, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, num_decode: int) -> None:
        """Notes that the draft model has computed tokens `[starts, ends)` of `rows`, `[R]` each. Rows after the first
        `num_decode` are chunks, which have no gap before them. In other rows, tokens after a gap do not count, and are
        computed again."""
        before = self.lengths[rows]
        chunks = torch.arange(len(rows), device=rows.device) >= num_decode
        self.lengths.index_copy_(0, rows, torch.where(chunks | (before >= starts), ends, before))

    def drop_rejected(self, known: KnownTokens) -> None:
        """Drops the draft model's keys and values of rejected drafts, and of last sampled tokens, not computed yet."""
        torch.minimum(self.lengths, known.lengths - 1, out=self.lengths)

    def propose(self, drafts: DraftSequences) -> torch.Tensor:
        return self.tokens[drafts.rows[drafts.owners], drafts.numbers - 1]


@dataclass(frozen=True, slots=True)
class DraftSequences:
    """The drafts of a step, int64 each: `sequences` `[n]`, the sequences that hold them; `numbers` `[n]`, the index of
    each in its row, from 1; `owners` `[n]`, the index of its row in `rows` `[drafting]`. `longest`: the maximum length
    of a row's text."""

    sequences: torch.Tensor
    numbers: torch.Tensor
    owners: torch.Tensor
    rows: torch.Tensor
    longest: int

    @classmethod
    def of(cls, flat: FlatPlan, to_device: Callable[[Int32], torch.Tensor]) -> DraftSequences | None:
        places = np.flatnonzero(flat.draft_numbers)
        if not len(places):
            return None
        first = flat.draft_numbers == 1
        plan, count = flat.plan, len(places)
        own = np.cumsum(first)[places] - 1
        together = np.concatenate((places, flat.draft_numbers[places], own, plan.rows[first]))
        on_device = to_device(together.astype(np.int32)).long()
        sequences, numbers, owners, rows = torch.tensor_split(on_device, (count, 2 * count, 3 * count))
        # The first draft's KV length is an upper bound of the row's length.
        return cls(sequences, numbers, owners, rows, int(plan.kv_lens[first].max()))


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The drafts of a decode step, int64 each: `firsts` `[drafting]`, the first sequence of each row with drafts;
    `drafts` `[n]`, the sequences of all drafts; `owners` `[n]`, the index of each draft's row in `firsts`."""

    firsts: torch.Tensor
    drafts: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def of(cls, flat: FlatPlan, to_device: Callable[[Int32], torch.Tensor]) -> StateMoves | None:
        drafts = np.flatnonzero(flat.draft_numbers)
        if not len(drafts):
            return None
        first = flat.draft_numbers == 1
        together = np.concatenate((np.flatnonzero(first) - 1, drafts, np.cumsum(first)[drafts] - 1))
        count = int(np.count_nonzero(first))
        on_device = to_device(together.astype(np.int32)).long()
        return cls(*torch.tensor_split(on_device, (count, count + len(drafts))))

    def slots(self, own: torch.Tensor, reported: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slots with the state after each row's last accepted draft, and the rows' own slots, int64
        `[drafting]` each. `own` `[R]`: the slot to which each sequence wrote its state; `reported` `[R]`: its sampled
        token, `REJECTED` after a rejected draft."""
        accepted = torch.zeros_like(self.firsts)
        accepted.index_add_(0, self.owners, (reported[self.drafts] != REJECTED).long())
        return own[self.firsts + accepted], own[self.firsts]


def kept_samples(
    draft_numbers: torch.Tensor, computed: torch.Tensor, sampled: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which lines follow only accepted drafts, and which of them are the last of their row: bool `[n]` each.
    `computed`: the token that each line computed; `sampled`: the one that it sampled; `most`: maximum drafts of a
    row."""
    first = draft_numbers == 0
    accepted = sampled.roll(1) == computed
    kept = first
    for _ in range(most):
        kept = first | (accepted & kept.roll(1))
    continues = (kept & ~first).roll(-1)
    return kept, kept & ~continues
