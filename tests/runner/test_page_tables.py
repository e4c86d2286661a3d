"""The page tables of all pools as one: columns follow from each pool, not from its position among them."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_jax.architectures import CacheKind, group_names
from sglang_jax.runner.page_tables import TableLayout, side_by_side
from sglang_jax.runner.plan import PageDeltas, PoolSpec, RunnerSpec

FULL = PoolSpec("full", CacheKind.FULL, 9, 4)
WINDOW = PoolSpec("swa", CacheKind.WINDOW, 9, 4, 8)
STATES = PoolSpec("mamba", CacheKind.STATE, 5, 4)
DRAFT = PoolSpec("draft full", CacheKind.FULL, 9, 4, draft=True)


def spec_of(*pools: PoolSpec) -> RunnerSpec:
    """Tables of three columns."""
    return RunnerSpec(pools, 4, 32, 12, 100)


@pytest.mark.parametrize(
    ("pools", "paged", "draft", "slots", "starts"),
    [
        ((FULL,), [(0, 3)], (), None, (0,)),
        ((STATES,), [], (), 0, (0,)),
        ((FULL, WINDOW, STATES), [(0, 3), (3, 6)], (), 6, (0, 3, 6)),
        ((FULL, WINDOW, DRAFT), [(0, 3), (3, 6), (6, 9)], (2,), None, (0, 3, 6)),
        ((FULL, STATES, DRAFT), [(0, 3), (4, 7)], (1,), 3, (0, 3, 4)),
    ],
    ids=["one", "states", "states last", "a draft model", "states and a draft model"],
)
def test_columns_are_found_by_pool(
    pools: tuple[PoolSpec, ...],
    paged: list[tuple[int, int]],
    draft: tuple[int, ...],
    slots: int | None,
    starts: tuple[int, ...],
) -> None:
    layout = TableLayout.of(spec_of(*pools))
    assert layout == TableLayout(tuple(paged), draft, slots, starts, STATES.num_pages if STATES in pools else 0)
    assert layout.states is (STATES in pools)


def test_entries_of_each_pool_go_to_its_columns() -> None:
    one = np.ones(1, np.int32)
    deltas = tuple(PageDeltas(one * row, one, one * 7) for row in range(3))
    table = side_by_side(deltas, TableLayout.of(spec_of(FULL, STATES, DRAFT)).starts)
    assert (table.rows.tolist(), table.columns.tolist(), table.pages.tolist()) == ([0, 1, 2], [1, 4, 5], [7, 7, 7])


def test_names_of_pools_are_unique() -> None:
    with pytest.raises(ValueError, match="pools named full, full: names must differ"):
        spec_of(FULL, FULL)


def test_groups_are_named_by_kind_and_window() -> None:
    full, one, other, states = (CacheKind.FULL, None), (CacheKind.WINDOW, 8), (CacheKind.WINDOW, 20), CacheKind.STATE
    assert group_names([full, one, (states, None)]) == ("full", "swa", "mamba")
    assert group_names([full, full, one, one, other]) == ("full", "full 2", "swa 8", "swa 8 2", "swa 20")
