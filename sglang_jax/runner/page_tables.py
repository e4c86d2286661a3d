"""The page tables of all cache groups as one, for runners that keep a single array of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.architectures import CacheKind
from sglang_jax.runner.plan import Int32, PageDeltas, RunnerSpec, SlotCopies


@dataclass(frozen=True, slots=True)
class TableLayout:
    """What lies side by side in the table: of each group with pages as many columns, then, of a model that keeps
    states, one column with each row's slot.

    `first_draft_slot`: of the slots of states that stand behind those of the pool. Each takes the state after a draft
    of the step that runs, see `runner.drafts`."""

    groups: int = 1
    states: bool = False
    first_draft_slot: int = 0

    @classmethod
    def of(cls, spec: RunnerSpec) -> TableLayout:
        """The layout of a runner's table.

        **Raises:** `ValueError` for pools of which one of states is not the last.
        """
        kept = [pool.kind is CacheKind.STATE for pool in spec.pools]
        if any(kept[:-1]):
            raise ValueError(f"pools of kinds {', '.join(pool.kind for pool in spec.pools)}: states come last")
        return cls(len(kept) - sum(kept), any(kept), spec.pools[-1].num_pages if any(kept) else 0)

    @property
    def pools(self) -> int:
        """Of pages, and of states."""
        return self.groups + self.states


ONE_GROUP = TableLayout()
"""Of models whose layers share pages of one kind."""


def pack_copies(copies: tuple[SlotCopies, ...], sources: Int32, targets: Int32) -> None:
    """Writes which slots are begun with in the place of others into `sources`, `targets` `[rows]`. No slot has the
    number of an unused target."""
    sources[:], targets[:] = 0, -1
    for found in copies:
        sources[: len(found.sources)] = found.sources
        targets[: len(found.targets)] = found.targets


def side_by_side(deltas: tuple[PageDeltas, ...], columns: int) -> PageDeltas:
    """Entries of tables of `columns` columns each, one table for each group, as entries of one table that has the
    groups' columns one after the other; the last of them may have one column, a row's slot for its state."""
    if len(deltas) == 1:
        return deltas[0]
    return PageDeltas(
        np.concatenate([each.rows for each in deltas]),
        np.concatenate([each.columns + np.int32(group * columns) for group, each in enumerate(deltas)]),
        np.concatenate([each.pages for each in deltas]),
    )
