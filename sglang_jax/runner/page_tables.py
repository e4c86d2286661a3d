"""The page tables of all cache groups as one array, as runners keep it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sglang_jax.runner.plan import Int32, PageDeltas, RunnerSpec, SlotCopies


@dataclass(frozen=True, slots=True)
class RankSizes:
    """The rows of a rank, and its maximum tokens of a step: see `RunnerSpec.dp_ranks`."""

    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns of the table: those of each pool, which start at `starts`, in the order of pools. `paged`: first and
    last column of each pool with pages; `draft`: indices in it of a draft model's pools; `slots`: the column with each
    row's slot for its state, None without states; `first_draft_slot`: the first slot after those of the pool, for the
    states after the drafts of a step (see `runner.drafts`); `ranks`: among which rows are divided, None for one."""

    paged: tuple[tuple[int, int | None], ...] = ((0, None),)
    draft: tuple[int, ...] = ()
    slots: int | None = None
    starts: tuple[int, ...] = (0,)
    first_draft_slot: int = 0
    ranks: RankSizes | None = None

    @classmethod
    def of(cls, spec: RunnerSpec) -> TableLayout:
        ends = list(accumulate(pool.columns(spec.max_context) for pool in spec.pools))
        starts = (0, *ends[:-1])
        placed = list(zip(spec.pools, starts, ends, strict=True))
        paged = [(first, last, pool.draft) for pool, first, last in placed if not pool.kind.keeps_states]
        kept = ((first, pool.num_pages) for pool, first, _ in placed if pool.kind.keeps_states)
        slots, first_draft_slot = next(kept, (None, 0))
        draft = tuple(index for index, (*_, draft) in enumerate(paged) if draft)
        ranks = RankSizes(spec.rows_of_rank, spec.rank_tokens) if spec.dp_ranks > 1 else None
        return cls(tuple((first, last) for first, last, _ in paged), draft, slots, starts, first_draft_slot, ranks)

    @property
    def states(self) -> bool:
        return self.slots is not None


ONE_GROUP = TableLayout()
"""The layout of models with one cache group."""


def pack_copies(copies: tuple[SlotCopies, ...], sources: Int32, targets: Int32) -> None:
    """Writes copies of slots into `sources` and `targets` `[rows]`. Unused targets are -1, which is not a slot."""
    sources[:], targets[:] = 0, -1
    for found in copies:
        sources[: len(found.sources)] = found.sources
        targets[: len(found.targets)] = found.targets


def side_by_side(deltas: tuple[PageDeltas, ...], starts: tuple[int, ...]) -> PageDeltas:
    """Entries of several pools' tables as entries of one table, in which each pool starts at its column of `starts`."""
    if len(deltas) == 1:
        return deltas[0]
    return PageDeltas(
        np.concatenate([each.rows for each in deltas]),
        np.concatenate([each.columns + np.int32(start) for start, each in zip(starts, deltas, strict=True)]),
        np.concatenate([each.pages for each in deltas]),
    )
