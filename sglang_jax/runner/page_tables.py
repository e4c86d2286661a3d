"""The page tables of all cache groups as one, for runners that keep a single array of them."""

from __future__ import annotations

import numpy as np

from sglang_jax.runner.plan import PageDeltas


def side_by_side(deltas: tuple[PageDeltas, ...], columns: int) -> PageDeltas:
    """Entries of tables of `columns` columns each, one table for each group, as entries of one table that has the
    groups' columns one after the other."""
    if len(deltas) == 1:
        return deltas[0]
    return PageDeltas(
        np.concatenate([each.rows for each in deltas]),
        np.concatenate([each.columns + np.int32(group * columns) for group, each in enumerate(deltas)]),
        np.concatenate([each.pages for each in deltas]),
    )
