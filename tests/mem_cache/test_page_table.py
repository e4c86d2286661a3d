"""The page table, and its changes that a plan carries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.mem_cache.page_table import PageTable


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def take(table: PageTable) -> dict[tuple[int, int], int]:
    """Deltas as (row, column) -> page; each entry may appear once."""
    deltas = table.take_deltas()
    assert deltas.rows.dtype == deltas.columns.dtype == deltas.pages.dtype == np.int32
    keys = list(zip(deltas.rows.tolist(), deltas.columns.tolist(), strict=True))
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, deltas.pages.tolist(), strict=True))


def test_there_are_no_deltas_without_writes() -> None:
    assert take(PageTable(4, 8)) == {}


def test_deltas_are_taken_once() -> None:
    """Sending whole tables each step costs more than the step."""
    table = PageTable(4, 8)
    table.write_run(2, 3, ids(7, 8, 9))
    assert take(table) == {(2, 3): 7, (2, 4): 8, (2, 5): 9}
    assert take(table) == {}
    table.write(ids(0, 3), ids(1, 7), ids(5, 6))
    assert take(table) == {(0, 1): 5, (3, 7): 6}
    assert table.run(2, 3, 6).tolist() == [7, 8, 9]


def test_an_entry_written_twice_appears_once_with_its_newest_page() -> None:
    """An entry that was switched to the tree's copy must not reach the runner in both versions."""
    table = PageTable(4, 8)
    table.write_run(1, 0, ids(4, 5))
    table.write_run(1, 1, ids(6, 7))
    table.write(ids(1), ids(0), ids(9))
    assert take(table) == {(1, 0): 9, (1, 1): 6, (1, 2): 7}


def test_rows_freed_since_are_left_out() -> None:
    table = PageTable(4, 8)
    table.write_run(1, 0, ids(4, 5))
    table.write_run(2, 0, ids(6))
    table.clear(1, table.pages.shape[1])
    assert take(table) == {(2, 0): 6}


def test_a_freed_rows_entries_do_not_leak_into_its_next_request() -> None:
    table = PageTable(4, 8)
    table.write_run(1, 0, ids(4, 5, 6))
    table.clear(1, table.pages.shape[1])
    table.write_run(1, 0, ids(7))
    assert take(table) == {(1, 0): 7}


def test_a_run_is_a_copy() -> None:
    """Pages that a request is about to free must not change under it when its row is cleared."""
    table = PageTable(2, 4)
    table.write_run(0, 0, ids(1, 2))
    run = table.run(0, 0, 2)
    table.clear(0, table.pages.shape[1])
    assert run.tolist() == [1, 2]


def test_deltas_stay_as_they_were_taken() -> None:
    """A table changed while a step in flight reads it is a race that took two years to find."""
    table = PageTable(2, 4)
    table.write_run(0, 0, ids(1, 2))
    deltas = table.take_deltas()
    table.write_run(0, 0, ids(3, 3))
    table.clear(0, table.pages.shape[1])
    assert deltas.pages.tolist() == [1, 2]


Write = tuple[int, int, list[int]]
writes = st.tuples(st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(1, 99), min_size=1, max_size=4))


@given(st.lists(st.one_of(writes, st.integers(0, 2), st.none()), max_size=30))
def test_a_copy_updated_only_by_deltas_equals_the_table(actions: list[Write | int | None]) -> None:
    """A row number clears that row, None sends the deltas. Entries of cleared rows may be stale in the copy: a row that
    is not in a plan is not read."""
    table, copy = PageTable(3, 8), np.zeros((3, 8), np.int32)
    for action in [*actions, None]:
        if action is None:
            for (row, column), page in take(table).items():
                assert page > 0
                copy[row, column] = page
            live = table.pages > 0
            assert (copy[live] == table.pages[live]).all()
        elif isinstance(action, int):
            table.clear(action, table.pages.shape[1])
        else:
            row, first, pages = action
            table.write_run(row, first, ids(*pages))
