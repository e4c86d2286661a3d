"""Nodes of the tree that are joined into one, and those that must not be yet: worked by hand with pages of four
tokens."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.caches import compute, int32_bytes, small_cache

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import RadixTree
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import PoolSpec

PROMPT = list(range(1, 31))


def open_row(cache: KVCache, tokens: list[int]) -> RowKV:
    return cache.open_row(cache.probe(int32_bytes(tokens), len(tokens), None))


def turn(cache: KVCache, tokens: list[int], *, proven: bool = True) -> None:
    """A request that computes its prompt, samples something finite if `proven`, and ends."""
    record = open_row(cache, tokens)
    compute(cache, record, tokens)
    if proven:
        assert cache.trust.prove(record, 1)
    cache.release_kv_cache(record, int32_bytes(tokens), insert=True)
    check_everything(cache)


def cached(cache: KVCache, tokens: list[int]) -> int:
    return cache.peek(int32_bytes(tokens), len(tokens), None)


def test_turns_become_one_node_and_split_again_where_another_diverges() -> None:
    cache = small_cache()
    for end in (8, 16, 24):
        turn(cache, PROMPT[:end])
        assert cache.tree.num_nodes == 1
    turn(cache, [*PROMPT[:12], 40, 41, 42, 43])
    assert cache.tree.num_nodes == 3
    assert [cached(cache, PROMPT[:end]) for end in (4, 12, 23, 24)] == [4, 12, 20, 24]


def test_unvalidated_nodes_are_not_joined_to_validated_ones() -> None:
    """A request with a non-finite sample removes only the unvalidated part from the cache."""
    cache = small_cache()
    turn(cache, PROMPT[:8])
    turn(cache, PROMPT[:16], proven=False)
    assert cache.tree.num_nodes == 2
    record = open_row(cache, PROMPT[:16])
    assert record.matched == 16
    cache.trust.distrust(record)
    cache.release_kv_cache(record, b"", insert=False)
    assert cached(cache, PROMPT[:16]) == 8
    turn(cache, PROMPT[:16])
    assert cache.tree.num_nodes == 1
    check_everything(cache)


def test_nodes_written_by_a_running_row_are_not_joined() -> None:
    """Its next sample may not be finite: then its own pages go, and those that others wrote before stay."""
    cache = small_cache()
    turn(cache, PROMPT[:8])
    writer, other = (open_row(cache, PROMPT[:16]) for _ in range(2))
    compute(cache, writer, PROMPT[:16])
    assert cache.trust.prove(writer, 1)
    compute(cache, other, PROMPT[:16])
    cache.release_kv_cache(other, int32_bytes(PROMPT[:16]), insert=True)
    assert cache.tree.num_nodes == 2
    cache.trust.distrust(writer)
    assert cached(cache, PROMPT[:16]) == 8
    cache.release_kv_cache(writer, b"", insert=False)
    check_everything(cache)
    assert cache.tree.writing == set()


def test_nodes_are_not_joined_where_a_lock_ends_between_them() -> None:
    cache = small_cache()
    turn(cache, PROMPT[:8])
    other = open_row(cache, PROMPT[:8])
    turn(cache, PROMPT[:16])
    assert cache.tree.num_nodes == 2
    cache.release_kv_cache(other, b"", insert=False)
    turn(cache, PROMPT[:24])
    assert cache.tree.num_nodes == 2, "only what a row adds, and what that follows, is looked at"
    assert cached(cache, PROMPT[:24]) == 24
    turn(cache, PROMPT[:8])
    check_everything(cache)


def test_all_chunks_of_a_turn_are_joined_with_the_node_above() -> None:
    cache = small_cache()
    turn(cache, PROMPT[:4])
    record = open_row(cache, PROMPT[:28])
    for end in range(8, 29, 4):
        compute(cache, record, PROMPT[:end])
    assert cache.tree.num_nodes == 7
    assert cache.trust.prove(record, 1)
    cache.release_kv_cache(record, int32_bytes(PROMPT[:28]), insert=True)
    assert cache.tree.num_nodes == 1
    check_everything(cache)


def test_a_window_is_not_joined_over_a_gap() -> None:
    """A long turn has freed the pages before its window: the pages of the node above would end up in the wrong
    place."""
    cache = KVCache((PoolSpec("swa", CacheKind.WINDOW, 25, 4, 9),), 4, 64, step_tokens=16, debug=True)
    record, tokens = open_row(cache, PROMPT), int32_bytes(PROMPT)
    compute(cache, record, PROMPT[:8])
    assert cache.extend_row(record, 28)
    cache.lengths.kv_committed[record.row] = 28
    cache.let_go(np.array([record.row]), tight=True)
    cache.cache_prefix(record, tokens, 28, None)
    assert cache.trust.prove(record, 1)
    cache.release_kv_cache(record, tokens, insert=True)
    check_everything(cache)
    assert [cached(cache, PROMPT[:end]) for end in (8, 16, 28)] == [8, 8, 28]
    assert cache.tree.num_nodes == 2
    cache.tree.evict(cache.groups[0].component, 2)
    assert [cached(cache, PROMPT[:end]) for end in (8, 28)] == [0, 28]
    assert cache.tree.num_nodes == 1, "what was above the gap is gone"
    check_everything(cache)


@pytest.mark.parametrize("what", ["locks", "proven"])
def test_joining_nodes_that_differ_is_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the checks above can fail: nodes are joined in spite of one difference."""
    join = RadixTree._join

    def join_anyway(self: RadixTree, upper: object) -> bool:
        (lower,) = upper.children.values()  # type: ignore[attr-defined]
        setattr(upper, what, getattr(lower, what))
        return join(self, upper)  # type: ignore[arg-type]

    monkeypatch.setattr(RadixTree, "_join", join_anyway)
    test = {
        "locks": test_nodes_are_not_joined_where_a_lock_ends_between_them,
        "proven": test_unvalidated_nodes_are_not_joined_to_validated_ones,
    }[what]
    with pytest.raises((AssertionError, AttributeError, KeyError)):
        test()
