"""Which pages are evicted when pages are short, and the cost of choosing them."""

from __future__ import annotations

import pytest
from helpers.caches import SmallTree

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.radix_tree import Node

A, B, C, D = ([10 * k + i for i in range(4)] for k in range(1, 5))
"""A tree with pages of four tokens."""


def cached(small: SmallTree, *names: str) -> str:
    """Those of `names` that are cached as a whole: "AB" stands for the tokens of A and B."""
    pages = {"A": A, "B": B, "C": C, "D": D}
    return " ".join(
        name for name in names if small.peek([t for letter in name for t in pages[letter]]) == 4 * len(name)
    )


def test_only_the_shortfall_is_evicted_and_from_the_tail() -> None:
    """Evicting a whole leaf for one page would drop prefixes that are still useful."""
    small = SmallTree()
    small.insert(A + B + C + D)
    assert small.evict(1) == 1
    assert small.peek(A + B + C + D) == 12
    assert small.evict(2) == 2
    assert small.peek(A + B + C + D) == 4
    assert small.pool.num_free == small.pool.total - 1


def test_a_trimmed_leaf_can_grow_again() -> None:
    small = SmallTree()
    small.insert(A + B + C)
    small.evict(1)
    small.insert(A + B + D)
    assert cached(small, "ABC", "ABD") == "ABD"
    assert small.full.evictable == 3


def test_a_shortfall_beyond_the_cache_evicts_all_of_it() -> None:
    small = SmallTree()
    small.insert(A + B)
    small.insert(C)
    assert small.evict(99) == 3
    assert small.evict(1) == 0
    assert small.pool.num_free == small.pool.total


def test_least_recently_used_is_evicted_first() -> None:
    small = SmallTree(policy=EvictionPolicy.LRU)
    for prefix in (A, B, C):
        small.insert(prefix)
    small.touch(A)
    small.evict(1)
    assert cached(small, "A", "B", "C") == "A C"
    small.insert(C)
    small.evict(1)
    assert cached(small, "A", "C") == "C"


def test_a_peek_does_not_count_as_use() -> None:
    small = SmallTree(policy=EvictionPolicy.LRU)
    small.insert(A)
    small.insert(B)
    small.peek(A)
    small.evict(1)
    assert cached(small, "A", "B") == "B"


def test_least_frequently_used_is_evicted_first_and_the_older_use_among_equals() -> None:
    small = SmallTree(policy=EvictionPolicy.LFU)
    for prefix in (A, B, C):
        small.insert(prefix)
    for prefix in (A, A, B, C):
        small.touch(prefix)
    small.evict(1)
    assert cached(small, "A", "B", "C") == "A C"
    small.evict(1)
    assert cached(small, "A", "C") == "A"


def test_first_in_is_evicted_first_for_any_use() -> None:
    small = SmallTree(policy=EvictionPolicy.FIFO)
    for prefix in (A, B, C):
        small.insert(prefix)
    small.touch(A)
    small.touch(A)
    small.evict(1)
    assert cached(small, "A", "B", "C") == "B C"


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_both_halves_of_a_split_node_keep_its_age_and_use(policy: EvictionPolicy) -> None:
    """A new node above old ones would look young, or unused, only because of the split."""
    small = SmallTree(policy=policy)
    lower = small.insert(A + B)
    lower.hits = 7
    created, last_access = lower.created, lower.last_access
    small.insert(C)
    small.insert(A + D)
    upper = lower.parent
    assert upper is not None
    assert (lower.created, lower.hits, lower.last_access) == (created, 7, last_access)
    assert (upper.created, upper.hits) == (created, 7)
    assert upper.last_access > last_access, "the insert went through it"


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_a_parent_becomes_evictable_after_its_last_child(policy: EvictionPolicy) -> None:
    small = SmallTree(policy=policy)
    small.insert(A + B)
    small.insert(A + C)
    assert len(small.full.order) == 2, "the common parent is no leaf"
    small.evict(2)
    assert cached(small, "A", "AB", "AC") == "A"
    assert small.evict(1) == 1
    assert small.tree.num_nodes == 0


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_locked_nodes_are_never_evicted(policy: EvictionPolicy) -> None:
    small = SmallTree(policy=policy)
    small.insert(A)
    small.insert(B)
    node = small.insert(A + C)
    small.tree.lock(node)
    assert small.full.evictable == 1
    assert small.evict(3) == 1
    assert cached(small, "A", "AC", "B") == "A AC"
    small.tree.unlock(node)
    assert small.evict(3) == 2


def test_an_unlock_does_not_count_as_use() -> None:
    """Unlocked leaves return to the order by their last use, not by the end of the lock."""
    small = SmallTree()
    oldest = small.insert(A)
    small.insert(B)
    small.tree.lock(oldest)
    small.tree.unlock(oldest)
    small.evict(1)
    assert cached(small, "A", "B") == "B"


def test_the_heap_does_not_outgrow_the_nodes_that_it_orders() -> None:
    """A node that is removed and added again leaves a stale entry; without sweeping, a busy prefix would fill the
    memory."""
    small = SmallTree()
    small.insert(A)
    small.insert(B)
    longest = 0
    for _ in range(2000):
        small.tree.lock(small.touch(A))
        small.tree.unlock(small.touch(A))
        longest = max(longest, len(small.full.order._heap))
    assert longest <= 2 * 2 + 64 + 1
    assert len(small.full.order) == 2


def test_the_order_forgets_discarded_nodes() -> None:
    order = EvictionOrder(EvictionPolicy.LRU)
    nodes = [Node(k, b"", None, None, now=k) for k in range(1, 5)]
    for node in nodes:
        order.add(node)
    order.discard(nodes[0])
    order.discard(nodes[0])
    nodes[1].last_access = 9
    order.add(nodes[1])
    assert order.first() is nodes[2]
    assert (nodes[0] in order, nodes[1] in order, len(order)) == (False, True, 3)
    for node in nodes:
        order.discard(node)
    assert order.first() is None


@pytest.mark.parametrize("leaves", [10, 3000])
def test_evicting_a_page_does_not_walk_the_tree(leaves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: collecting all leaves for each shortfall made eviction slower with the size of the tree."""
    small = SmallTree(page_size=1, pages=4 * leaves)
    for k in range(leaves):
        small.insert([k, 0, 1, 2])
    looked_at: list[Node] = []
    pages = FullKV.pages
    monkeypatch.setattr(FullKV, "pages", lambda self, node: looked_at.append(node) or pages(self, node))
    monkeypatch.setattr(type(small.tree), "nodes", lambda self: pytest.fail("the whole tree was walked"))
    assert small.evict(1) == 1
    assert len({node.id for node in looked_at}) == 1
    assert small.evict(4) == 4
    assert len({node.id for node in looked_at}) <= 4
    assert len(looked_at) <= 10
