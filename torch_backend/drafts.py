"""Guessing what rows sample next, on the device, and what counts of what was sampled behind guesses.

Guesses are a draft model's (`draft_model.py`), or go by where the end of a row's text has stood before in it: that is
prompt lookup decoding (Saxena 2023). A guess costs a query of the step, and is right where a text repeats
itself: code that is edited, passages that are quoted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_jax.runner.drafts import LONGEST_MATCH, REFUSED, SHORTEST_MATCH, Unfolded
from sglang_jax.runner.plan import DRAFT, HINT_TOKENS, Int32


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The text of every row of a runner that drafts, as the device knows it.

    - `tokens`: int32 `[rows + 1, max_context + 1]`, prompt and output; what stands behind a row's length is anything.
    - `lengths`: int32 `[rows + 1]`, tokens of each row that has sampled, the last of which is not computed yet.
    - `hints`: int32 `[rows + 1, HINT_TOKENS]`, parts of other texts that are searched as well; `DRAFT` behind them.
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
        """`tokens`, which stand at `kv_lens` of `rows` int64, of those lines `[n]` that are `kept`; `last`: of these
        the last of each row."""
        columns = kv_lens.clamp(max=self.tokens.shape[1] - 1).long()
        self.tokens.index_put_((torch.where(kept, rows, self.dump_row), columns), tokens)
        self.lengths.index_copy_(0, torch.where(last, rows, self.dump_row), kv_lens + 1)

    def guess(self, guesses: Guesses) -> torch.Tensor:
        """What rows are likely to sample: int32 `[guesses]`, `DRAFT` where there is nothing to guess by.

        Texts go on as they went on behind the latest of the places that look most like their ends, or as their hints
        do, where these look more like it. Where a text's place is so near that it runs out, the text is taken to
        repeat itself.
        """
        of_text = min(guesses.longest, self.tokens.shape[1])  # columns; those behind them are a hint's
        tokens = torch.cat((self.tokens[guesses.rows, :of_text], self.hints[guesses.rows]), 1)
        width = tokens.shape[1]
        last = self.lengths[guesses.rows].long()[:, None] - 1
        columns = torch.arange(width, device=tokens.device)
        in_hint = columns >= of_text
        since_begin = torch.where(in_hint, columns - of_text, columns)
        alike = in_hint | (columns < last)
        matched = torch.zeros_like(tokens)
        for back in range(LONGEST_MATCH):
            wanted = tokens.gather(1, (last - back).clamp(min=0))
            alike = alike & (tokens.roll(back, 1) == wanted) & (since_begin >= back) & (last >= back)
            matched += alike
        later = torch.where(in_hint, since_begin, columns + HINT_TOKENS)
        best, place = torch.where(matched >= SHORTEST_MATCH, matched.long() * width + later, -1).max(dim=1)
        own = guesses.owners
        ahead = guesses.numbers - 1
        ahead = torch.where(place[own] < of_text, ahead % (last[:, 0] - place).clamp(min=1)[own], ahead)
        found = place[own] + 1 + ahead
        known = (best[own] >= 0) & (found < width)
        return torch.where(known, tokens[own, found.clamp(max=width - 1)], DRAFT)


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """What a draft model has guessed and computed.

    - `tokens`: int32 `[rows + 1, drafts]`, of each row the guesses of the step that runs; `DRAFT` for none.
    - `lengths`: int32 `[rows + 1]`, how many of a row's tokens, from the first on, have keys and values of the draft
      model.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, drafts: int, device: torch.device) -> DraftedTokens:
        return cls(
            torch.full((rows, drafts), DRAFT, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def computed_with(self, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, num_decode: int) -> None:
        """The draft model has computed tokens `[starts, ends)` of `rows`, all `[R]`. Before chunks, which are not among
        the first `num_decode`, nothing is missed; what stands behind missed ones is computed again."""
        before = self.lengths[rows]
        chunks = torch.arange(len(rows), device=rows.device) >= num_decode
        self.lengths.index_copy_(0, rows, torch.where(chunks | (before >= starts), ends, before))

    def keep_right(self, known: KnownTokens) -> None:
        """Once a step has told which guesses were right: what was computed of wrong ones is missing. Nor is what a row
        sampled last computed."""
        torch.minimum(self.lengths, known.lengths - 1, out=self.lengths)

    def guess(self, guesses: Guesses) -> torch.Tensor:
        """What rows are likely to sample, as `KnownTokens.guess`."""
        return self.tokens[guesses.rows[guesses.owners], guesses.numbers - 1]


@dataclass(frozen=True, slots=True)
class Guesses:
    """The drafts of a step, int64 each: `sequences` `[guesses]` that stand for one, `numbers` `[guesses]`, which of its
    row's each is, from 1, and `owners` `[guesses]`, places of these rows in `rows` `[drafting]`.

    `longest`: the most tokens that the text of one has.
    """

    sequences: torch.Tensor
    numbers: torch.Tensor
    owners: torch.Tensor
    rows: torch.Tensor
    longest: int

    @classmethod
    def of(cls, unfolded: Unfolded, to_device: Callable[[Int32], torch.Tensor]) -> Guesses | None:
        """Those of a plan; None if it has none."""
        places = np.flatnonzero(unfolded.guesses)
        if not len(places):
            return None
        first = unfolded.guesses == 1
        plan, count = unfolded.plan, len(places)
        own = np.cumsum(first)[places] - 1
        together = np.concatenate((places, unfolded.guesses[places], own, plan.rows[first]))
        on_device = to_device(together.astype(np.int32)).long()
        sequences, numbers, owners, rows = torch.tensor_split(on_device, (count, 2 * count, 3 * count))
        # A row has as many tokens as the first of its drafts is long, or fewer.
        return cls(sequences, numbers, owners, rows, int(plan.kv_lens[first].max()))


@dataclass(frozen=True, slots=True)
class DraftMoves:
    """Of a decode step with drafts, int64 each: `firsts` `[drafting]`, the first sequences of the rows that have some,
    and of all drafts the sequences, `drafts` `[guesses]`, and the places of their rows in `firsts`, `owners`."""

    firsts: torch.Tensor
    drafts: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def of(cls, unfolded: Unfolded, to_device: Callable[[Int32], torch.Tensor]) -> DraftMoves | None:
        """Those of a plan; None if it has no drafts."""
        drafts = np.flatnonzero(unfolded.guesses)
        if not len(drafts):
            return None
        first = unfolded.guesses == 1
        together = np.concatenate((np.flatnonzero(first) - 1, drafts, np.cumsum(first)[drafts] - 1))
        count = int(np.count_nonzero(first))
        on_device = to_device(together.astype(np.int32)).long()
        return cls(*torch.tensor_split(on_device, (count, count + len(drafts))))

    def slots(self, own: torch.Tensor, told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which slots hold the states after the last draft of each row that was right, and the rows' own: int64
        `[drafting]` both. `own` `[R]`: where each sequence left its state; `told` `[R]`: what each sampled, `REFUSED`
        behind drafts that were wrong."""
        right = torch.zeros_like(self.firsts)
        right.index_add_(0, self.owners, (told[self.drafts] != REFUSED).long())
        return own[self.firsts + right], own[self.firsts]


def kept_samples(
    guesses: torch.Tensor, computed: torch.Tensor, sampled: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which lines `[n]` sampled behind nothing wrong, and which of them are their rows' last: bool `[n]` each.

    `computed`: what each computed; `sampled`: what it sampled. `most`: guesses of a row.
    """
    first = guesses == 0
    right = sampled.roll(1) == computed
    kept = first
    for _ in range(most):
        kept = first | (right & kept.roll(1))
    goes_on = (kept & ~first).roll(-1)
    return kept, kept & ~goes_on
