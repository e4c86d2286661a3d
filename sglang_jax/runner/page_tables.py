"""The page tables of all cache groups as one, for runners that keep a single array of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sglang_jax.runner.plan import Int32, PageDeltas, RunnerSpec, SlotCopies


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Columns of the table: those of the pools, in their order, which begin at `starts`.

    `paged`: the first column of each pool with pages, and the end; `draft`: indices in it of a draft model's. `slots`:
    the column with each row's slot for its state, None without states. `first_draft_slot`: of the slots behind those of
    the pool. Each takes the state after a draft of the step that runs, see `runner.drafts`."""

    paged: tuple[tuple[int, int | None], ...] = ((0, None),)
    draft: tuple[int, ...] = ()
    slots: int | None = None
    starts: tuple[int, ...] = (0,)
    first_draft_slot: int = 0

    @classmethod
    def of(cls, spec: RunnerSpec) -> TableLayout:
        """The layout of a runner's table."""
        ends = list(accumulate(pool.columns(spec.max_context) for pool in spec.pools))
        starts = (0, *ends[:-1])
        placed = list(zip(spec.pools, starts, ends, strict=True))
        paged = [(first, last, pool.draft) for pool, first, last in placed if not pool.kind.keeps_states]
        kept = ((first, pool.num_pages) for pool, first, _ in placed if pool.kind.keeps_states)
        slots, first_draft_slot = next(kept, (None, 0))
        draft = tuple(index for index, (*_, draft) in enumerate(paged) if draft)
        return cls(tuple((first, last) for first, last, _ in paged), draft, slots, starts, first_draft_slot)

    @property
    def states(self) -> bool:
        """Whether the model keeps states."""
        return self.slots is not None


ONE_GROUP = TableLayout()
"""Of models whose layers share pages of one kind."""


def pack_copies(copies: tuple[SlotCopies, ...], sources: Int32, targets: Int32) -> None:
    """Writes which slots are begun with in the place of others into `sources`, `targets` `[rows]`. No slot has the
    number of an unused target."""
    sources[:], targets[:] = 0, -1
    for found in copies:
        sources[: len(found.sources)] = found.sources
        targets[: len(found.targets)] = found.targets


def side_by_side(deltas: tuple[PageDeltas, ...], starts: tuple[int, ...]) -> PageDeltas:
    """Entries of the tables of pools as entries of one table, where each of them begins at its column of `starts`."""
    if len(deltas) == 1:
        return deltas[0]
    return PageDeltas(
        np.concatenate([each.rows for each in deltas]),
        np.concatenate([each.columns + np.int32(start) for start, each in zip(starts, deltas, strict=True)]),
        np.concatenate([each.pages for each in deltas]),
    )
