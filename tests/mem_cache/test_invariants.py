"""The checks must fail on every kind of wrong accounting; a check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.caches import compute, int32_bytes, small_cache

from sglang_jax.mem_cache.invariants import InvariantError, check_conservation, check_everything, page_balance
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import Node

SHARED = list(range(1, 9))


def balanced_cache() -> KVCache:
    """Rows 0 and 1 share two pages; each has a third page and a tail to itself; one more prefix is evictable."""
    cache = small_cache()
    gone = cache.open_row(cache.probe(int32_bytes([99] * 6), 5, None))
    compute(cache, gone, [99] * 6)
    cache.release_kv_cache(gone, int32_bytes([99] * 6), insert=True)
    for k in range(2):
        tokens = [*SHARED, *([50 + k] * 6)]
        compute(cache, cache.open_row(cache.probe(int32_bytes(tokens), 13, None)), tokens)
    check_everything(cache)
    return cache


def node_of(cache: KVCache, locked: bool, leaf: bool = True) -> Node:
    return next(node for node in cache.tree.nodes() if bool(node.locks) == locked and (not node.children) == leaf)


def lose_a_free_page(cache: KVCache) -> None:
    cache.groups[0].pool.num_free -= 1


def miscount_evictable(cache: KVCache) -> None:
    cache.groups[0].component.evictable += 1
    cache.groups[0].pool.num_free -= 1


def miscount_protected(cache: KVCache) -> None:
    cache.groups[0].component.protected -= 1
    cache.groups[0].component.evictable += 1


def leak_a_lock(cache: KVCache) -> None:
    node_of(cache, locked=True).locks += 1


def forget_a_lock(cache: KVCache) -> None:
    node_of(cache, locked=True).locks = 0


def lose_a_nodes_page(cache: KVCache) -> None:
    node = node_of(cache, locked=True)
    node.values[0] = cache.groups[0].component.pages(node)[:-1]


def unlink_a_node(cache: KVCache) -> None:
    node = node_of(cache, locked=True)
    node.parent = node_of(cache, locked=False)


def order_a_locked_node(cache: KVCache) -> None:
    cache.groups[0].component.order.add(node_of(cache, locked=True))


def order_an_inner_node(cache: KVCache) -> None:
    cache.groups[0].component.order.add(node_of(cache, locked=True, leaf=False))


def drop_a_leaf_from_the_order(cache: KVCache) -> None:
    cache.groups[0].component.order.discard(node_of(cache, locked=False))


def miscount_nodes(cache: KVCache) -> None:
    cache.tree.num_nodes += 1


def commit_beyond_allocated(cache: KVCache) -> None:
    cache.lengths.kv_committed[0] = cache.lengths.kv_allocated[0] + 1


def protect_beyond_committed(cache: KVCache) -> None:
    cache.lengths.kv_committed[0] = cache.lengths.cache_protected[0] - 1


def protect_part_of_a_page(cache: KVCache) -> None:
    cache.lengths.cache_protected[0] += 1


def point_a_row_elsewhere(cache: KVCache) -> None:
    cache.groups[0].table.pages[0, 0] = cache.groups[0].table.pages[1, 2]


def give_a_page_to_two_rows(cache: KVCache) -> None:
    cache.groups[0].table.pages[0, 3] = cache.groups[0].table.pages[1, 3]


def own_the_pad_page(cache: KVCache) -> None:
    cache.groups[0].table.pages[0, 3] = 0


def retire_a_page_that_is_owned(cache: KVCache) -> None:
    cache.groups[0]._retired.append((3, np.array([1], np.int32)))
    cache.groups[0].pool.num_free -= 1


def forget_to_clear_a_column(cache: KVCache) -> None:
    cache.groups[0].table.pages[0, -1] = 1


def depend_on_another_namespace(cache: KVCache) -> None:
    cache.open_rows[0].namespace = "other"


FAULTS = [
    (lose_a_free_page, "do not add up"),
    (miscount_evictable, "miscounted"),
    (miscount_protected, "miscounted"),
    (leak_a_lock, "2 locks, 1 requests"),
    (forget_a_lock, "0 locks, 1 requests"),
    (lose_a_nodes_page, "key and pages differ"),
    (unlink_a_node, "not its parent's child|locks"),
    (order_a_locked_node, "the order says otherwise"),
    (order_an_inner_node, "the order says otherwise"),
    (drop_a_leaf_from_the_order, "the order says otherwise"),
    (miscount_nodes, "counted as"),
    (commit_beyond_allocated, "row 0: lengths"),
    (protect_beyond_committed, "row 0: lengths"),
    (protect_part_of_a_page, "not page aligned"),
    (point_a_row_elsewhere, "the table differs from the tree"),
    (give_a_page_to_two_rows, "two owners"),
    (own_the_pad_page, "the pad page is owned"),
    (retire_a_page_that_is_owned, "two owners"),
    (forget_to_clear_a_column, "names pages beyond"),
    (depend_on_another_namespace, "a prefix of another namespace"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_wrong_accounting_is_caught(plant: Callable[[KVCache], None], message: str) -> None:
    cache = balanced_cache()
    plant(cache)
    with pytest.raises(InvariantError, match=message):
        check_everything(cache)


def test_a_lost_page_is_caught_by_the_cheap_check_too() -> None:
    """A single page is enough: a tolerance hides leaks."""
    cache = balanced_cache()
    check_conservation(cache)
    cache.groups[0].pool.num_free -= 1
    with pytest.raises(
        InvariantError, match=r"PageBalance\(free=24, evictable=1, session=0, protected=4, request_owned=2"
    ):
        check_conservation(cache)


def test_the_page_balance_of_a_worked_example() -> None:
    cache = balanced_cache()
    balance = page_balance(cache, cache.groups[0])
    assert balance.balanced
    assert (balance.free, balance.evictable, balance.protected, balance.request_owned) == (25, 1, 4, 2)
    assert (balance.retired, balance.total) == (0, 32)
