"""Converts steps with drafts for runners whose kernels have one query per sequence: each query becomes a sequence. A
step writes all its keys and values before any query reads them, so queries of one row see the same together as one
after the other. The sample at a position is a function of the logits, the row's parameters and the position; a draft is
accepted if and only if it equals that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_jax.runner.plan import (
    DRAFT,
    HINT_TOKENS,
    INVALID_TOKEN,
    HintUpdate,
    Int32,
    StepPlan,
    StepResult,
    TextUpdate,
    TopLogprobs,
)

REJECTED = -3
"""Replaces a token that was sampled after a rejected draft."""

SHORTEST_MATCH, LONGEST_MATCH = 2, 4
"""Minimum and maximum length of the n-gram at the end of a text that is searched in it, in tokens."""


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """A plan whose decode sequences have one query each.

    - `plan`: one sequence per query of the original decode rows, and the chunks.
    - `draft_numbers`: `[sequences]`, a draft's number within its row, from 1; otherwise 0.
    - `firsts`: `[n]`, the (first) sequence of each sequence of the original plan.
    """

    plan: StepPlan
    draft_numbers: Int32
    firsts: Int32

    def drafting(self) -> tuple[Int32, Int32]:
        """The rows with drafts, and the number of drafts of each: `[n]` both."""
        first = np.flatnonzero(self.draft_numbers == 1)
        return self.plan.rows[first], np.add.reduceat(self.draft_numbers > 0, first).astype(np.int32)


def flatten_drafts(plan: StepPlan) -> FlatPlan:
    """Makes each query of a sequence with drafts a sequence that samples, in order."""
    sequences = len(plan.rows)
    drafted = plan.tokens == DRAFT
    if not drafted.any():
        return FlatPlan(plan, np.zeros(sequences, np.int32), np.arange(sequences, dtype=np.int32))
    starts = np.cumsum(plan.query_lens) - plan.query_lens
    drafts = np.add.reduceat(drafted, starts)
    times = 1 + drafts
    firsts = np.cumsum(times) - times
    draft_numbers = np.arange(int(times.sum())) - np.repeat(firsts, times)
    flat = replace(
        plan,
        rows=np.repeat(plan.rows, times),
        num_decode=plan.num_decode + int(times[drafts > 0].sum()),
        query_lens=np.repeat(np.where(drafts > 0, 1, plan.query_lens), times).astype(np.int32),
        kv_lens=(np.repeat(plan.kv_lens - drafts, times) + draft_numbers).astype(np.int32),
        samples=np.repeat(plan.samples, times),
        length_on_device=None if plan.length_on_device is None else np.repeat(plan.length_on_device, times),
        masked=None if plan.masked is None else np.repeat(plan.masked, times),
        prompt_logprobs=tuple(
            replace(wanted, sequence=int(firsts[wanted.sequence])) for wanted in plan.prompt_logprobs
        ),
        pooled=tuple(replace(part, sequence=int(firsts[part.sequence])) for part in plan.pooled),
    )
    return FlatPlan(flat, draft_numbers.astype(np.int32), firsts.astype(np.int32))


def restore_rows(flat: FlatPlan, found: StepResult, width: int) -> StepResult:
    """The result of the original plan, from that of the flat one (`found`). `width`: the runner's `max_samples`."""
    firsts, sequences = flat.firsts, len(flat.draft_numbers)
    if len(firsts) == sequences:
        return found
    times = np.diff(firsts, append=sequences)
    own = np.minimum(firsts[:, None] + np.arange(width), sequences - 1)
    tokens = np.where(np.arange(width) < times[:, None], found.tokens[own, 0], REJECTED)
    counts = (tokens != REJECTED).sum(axis=1) * (found.counts[firsts] > 0)
    logprobs = found.logprobs
    if logprobs is not None:
        places = own.reshape(-1)
        logprobs = TopLogprobs(logprobs.logprobs[places], logprobs.top_ids[places], logprobs.top_logprobs[places])
    tokens = np.where(tokens == REJECTED, INVALID_TOKEN, tokens).astype(np.int32)
    return replace(found, tokens=tokens, counts=counts.astype(np.int32), logprobs=logprobs)


def pack_texts(updates: Sequence[TextUpdate], size: int, pad_row: int, width: int) -> Int32:
    """Up to `size` texts of at most `width` tokens as int32 `[size, 2 + width]`: row, length and tokens of each. Unused
    entries empty row `pad_row`."""
    packed = np.zeros((size, 2 + width), np.int32)
    packed[:, 0] = pad_row
    for entry, update in zip(packed, updates, strict=False):
        entry[:2] = update.row, len(update.tokens)
        entry[2 : 2 + len(update.tokens)] = update.tokens
    return packed


def pack_hints(updates: Sequence[HintUpdate], size: int, pad_row: int) -> Int32:
    """Up to `size` hints as int32 `[size, 1 + HINT_TOKENS]`: row and tokens of each, padded with `DRAFT`, which no text
    contains. Unused entries have row `pad_row`."""
    packed = np.full((size, 1 + HINT_TOKENS), DRAFT, np.int32)
    packed[:, 0] = pad_row
    for entry, update in zip(packed, updates, strict=False):
        entry[0] = update.row
        entry[1 : 1 + len(update.tokens)] = update.tokens
    return packed
