"""The window yields items with a common key one after the other, to one taker or several, and loses none."""

from __future__ import annotations

import random
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.engine.lookahead import Lookahead, shared_length

KEYS = st.lists(st.text(alphabet="ab", max_size=5).map(str.encode), max_size=30)


def drain(window: Lookahead[int], arrivals: list[bytes], takers: int = 1) -> list[tuple[int, int]]:
    """(taker, number) in the order of taking; the window is filled up before each."""
    taken = []
    number = turn = 0
    while number < len(arrivals) or len(window):
        while number < len(arrivals) and not window.full:
            window.push(number, key=arrivals[number], number=number, size=len(arrivals[number]))
            number += 1
        item = window.take(turn % takers)
        assert item is not None
        taken.append((turn % takers, item))
        turn += 1
    assert window.take() is None
    return taken


@given(KEYS, st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_everything_is_taken_once(arrivals: list[bytes], size: int, takers: int, reorder: bool) -> None:
    taken = drain(Lookahead(size, 10**6, reorder=reorder), arrivals, takers)
    assert sorted(number for _, number in taken) == list(range(len(arrivals)))
    if not reorder:
        assert [number for _, number in taken] == list(range(len(arrivals)))


@given(KEYS)
def test_a_window_that_holds_all_is_a_stable_sort(arrivals: list[bytes]) -> None:
    taken = [number for _, number in drain(Lookahead(1000, 10**6), arrivals)]
    assert taken == sorted(range(len(arrivals)), key=lambda number: arrivals[number])


def test_runs_are_twice_as_long_as_the_window() -> None:
    choice = random.Random(1)
    arrivals = [b"%08d" % choice.randrange(10**8) for _ in range(20_000)]
    taken = [arrivals[number] for _, number in drain(Lookahead(100, 10**6), arrivals)]
    falls = sum(one > other for one, other in pairwise(taken))
    assert 190 < len(arrivals) / (falls + 1) < 210


def test_bytes_bound_the_window_and_a_large_item_enters_by_itself() -> None:
    window: Lookahead[str] = Lookahead(100, 10)
    assert not window.full
    window.push("large", key=b"", number=0, size=50)
    assert window.full
    assert window.take() == "large"
    for number in range(5):
        assert not window.full
        window.push("small", key=b"", number=number + 1, size=2)
    assert window.full


def splits(taken: list[tuple[int, int]], arrivals: list[bytes]) -> int:
    """How often a taker started a group: each time it computes the group's prefix."""
    begun = 0
    for taker in {taker for taker, _ in taken}:
        groups = [arrivals[number][:5] for one, number in taken if one == taker]
        begun += sum(1 for _ in groupby(groups))
    return begun


@pytest.mark.parametrize("takers", [1, 2, 3, 8])
def test_a_group_goes_to_one_taker(takers: int) -> None:
    choice = random.Random(takers)
    arrivals = [b"%05d %05d" % (group, choice.randrange(10**5)) for group in range(100) for _ in range(20)]
    choice.shuffle(arrivals)
    taken = drain(Lookahead(10_000, 10**7), arrivals, takers)
    # At the end takers share groups, as nothing else is left to do. In parallel each would start all of them.
    assert splits(taken, arrivals) <= 100 + 5 * (takers - 1)
    shares = [sum(taker == one for one, _ in taken) for taker in range(takers)]
    assert max(shares) - min(shares) <= 1


def test_takers_that_share_one_group_are_all_served() -> None:
    arrivals = [b"one prefix for all %03d" % number for number in range(100)]
    taken = drain(Lookahead(1000, 10**6), arrivals, 4)
    assert len(taken) == 100


def test_groups_of_a_lost_taker_are_free_for_the_others() -> None:
    window: Lookahead[int] = Lookahead(100, 10**6)
    for number, key in enumerate([b"aa1", b"aa2", b"aa3", b"bb1", b"bb2"]):
        window.push(number, key=key, number=number, size=1)
    assert [window.take(0), window.take(1)] == [0, 3]
    window.forget(0)
    assert [window.take(1), window.take(1), window.take(1)] == [4, 1, 2]


@given(st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=20))
def test_shared_length(front: bytes, one: bytes, other: bytes) -> None:
    length = shared_length(front + one, front + other)
    assert (front + one)[:length] == (front + other)[:length]
    rest = (front + one)[length : length + 1], (front + other)[length : length + 1]
    assert not all(rest) or rest[0] != rest[1]
