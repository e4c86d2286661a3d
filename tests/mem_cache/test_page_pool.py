"""The stack of free pages, and the ledger that knows each page's owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.mem_cache.ledger import (
    FREE,
    PAD,
    RETIRED,
    OwnerKind,
    OwnershipError,
    PageLedger,
    describe_owner,
    node_owner,
    request_owner,
    request_owners,
)
from sglang_jax.mem_cache.page_pool import PagePool

OWNER = request_owner(3)


def make_pool(num_pages: int, ledger: bool = True) -> PagePool:
    return PagePool(num_pages, 4, PageLedger(num_pages) if ledger else None)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


with_and_without_ledger = pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no-ledger"])


def test_a_pool_without_usable_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1, 4)


@with_and_without_ledger
def test_alloc_gives_all_or_nothing(ledger: bool) -> None:
    """A partial allocation would have to be rolled back by the caller, and was not."""
    pool = make_pool(6, ledger)
    assert pool.alloc(6, OWNER) is None
    assert pool.num_free == pool.total == 5
    pages = pool.alloc(5, OWNER)
    assert pages is not None
    assert pages.dtype == np.int32
    assert pool.alloc(1, OWNER) is None
    none = pool.alloc(0, OWNER)
    assert none is not None
    assert len(none) == 0


@with_and_without_ledger
def test_the_pad_page_is_never_handed_out_and_never_taken_back(ledger: bool) -> None:
    pool = make_pool(9, ledger)
    pages = pool.alloc(pool.total, OWNER)
    assert pages is not None
    assert sorted(pages.tolist()) == list(range(1, 9))
    with pytest.raises(OwnershipError):
        pool.free(ids(0), OWNER)
    assert pool.num_free == 0


@with_and_without_ledger
def test_double_free_across_calls_is_an_error(ledger: bool) -> None:
    """Regression: a second release path freed the same pages again; no error appeared until two requests shared
    a page."""
    pool = make_pool(9, ledger)
    pages = pool.alloc(3, OWNER)
    assert pages is not None
    pool.free(pages, OWNER)
    with pytest.raises(OwnershipError):
        pool.free(pages[:1], OWNER)
    assert pool.num_free == 8


@with_and_without_ledger
def test_double_free_within_one_call_is_an_error(ledger: bool) -> None:
    """Freeing by token index hid this behind a `unique`."""
    pool = make_pool(9, ledger)
    pages = pool.alloc(3, OWNER)
    assert pages is not None
    with pytest.raises(OwnershipError, match=r"twice|double free"):
        pool.free(pages[[0, 1, 0]], OWNER)
    assert pool.num_free == 5


@with_and_without_ledger
def test_a_refused_free_changes_nothing(ledger: bool) -> None:
    pool = make_pool(9, ledger)
    mine = pool.alloc(2, OWNER)
    assert mine is not None
    free_before = pool.free_pages().copy()
    with pytest.raises(OwnershipError):
        pool.free(np.concatenate((mine, free_before[:1])), OWNER)
    assert pool.free_pages().tolist() == free_before.tolist()
    pool.free(mine, OWNER)
    assert pool.num_free == pool.total


def test_freeing_a_page_of_another_owner_names_both() -> None:
    pool = make_pool(9)
    pages = pool.alloc(2, node_owner(7))
    assert pages is not None
    with pytest.raises(OwnershipError) as caught:
        pool.free(pages, request_owner(3))
    assert str(caught.value) == (
        f"page {pages[0]} belongs to tree node 7, but the request in row 3 tried to give it away"
    )


def test_the_error_names_the_page_that_is_wrong_among_many_owners() -> None:
    pool = make_pool(9)
    rows = np.array([0, 1, 2], np.int32)
    pages = pool.alloc(3, request_owners(rows))
    assert pages is not None
    with pytest.raises(OwnershipError, match=f"page {pages[2]} belongs to the request in row 2, but .* row 5"):
        pool.free(pages, request_owners(np.array([0, 1, 5], np.int32)))
    pool.free(pages, request_owners(rows))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (FREE, "the free stack"),
        (PAD, "the padding"),
        (RETIRED, "a step in flight"),
        (request_owner(12), "the request in row 12"),
        (node_owner(0), "tree node 0"),
    ],
)
def test_owners_are_described_in_words(code: int, words: str) -> None:
    assert describe_owner(code) == words


def test_the_ledger_moves_a_page_between_owners_and_counts_them() -> None:
    ledger = PageLedger(6)
    ledger.move(ids(1, 2, 3), FREE, OWNER)
    ledger.move(ids(3), OWNER, node_owner(9))
    assert [ledger.count(kind) for kind in (OwnerKind.FREE, OwnerKind.PAD, OwnerKind.REQUEST, OwnerKind.NODE)] == [
        2,
        1,
        2,
        1,
    ]
    with pytest.raises(OwnershipError, match="page 3 belongs to tree node 9, but the free stack"):
        ledger.move(ids(3), FREE, OWNER)
    with pytest.raises(OwnershipError, match=r"twice in one call: \[1, 1\]"):
        ledger.move(ids(1, 1), OWNER, FREE)
    assert ledger.count(OwnerKind.REQUEST) == 2


@given(st.lists(st.integers(-6, 6), max_size=40), st.booleans())
def test_any_sequence_of_allocations_and_frees_conserves_pages(moves: list[int], ledger: bool) -> None:
    """n > 0 allocates n pages, n < 0 frees the oldest |n|; the model is a set of page ids."""
    pool = make_pool(17, ledger)
    held: list[int] = []
    for move in moves:
        if move > 0:
            pages = pool.alloc(move, OWNER)
            assert (pages is None) == (move > 16 - len(held))
            held += [] if pages is None else pages.tolist()
        else:
            given_back, held = held[:-move], held[-move:]
            pool.free(np.array(given_back, np.int32), OWNER)
        assert len(set(held)) == len(held)
        assert sorted(held + pool.free_pages().tolist()) == list(range(1, 17))
