"""Small prefix trees and KV caches with a ledger, for tests of `mem_cache`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.ledger import PageLedger, Pages, request_owner
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.radix_tree import Insertion, Namespace, Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.runner.plan import PoolSpec

PREVIOUS_OWNER = request_owner(0)


def int32_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens in the form that the tree takes."""
    return np.array(list(tokens), np.int32).tobytes()


@dataclass
class SmallTree:
    """A tree whose components hold full-attention pages: one with a pool of `pages`, without the pad page, and one with
    a separate pool for each of `siblings`."""

    page_size: int = 4
    pages: int = 64
    policy: EvictionPolicy = EvictionPolicy.LRU
    siblings: tuple[int, ...] = ()
    fulls: tuple[FullKV, ...] = field(init=False)
    tree: RadixTree = field(init=False)

    def __post_init__(self) -> None:
        pools = (PagePool(pages + 1, self.page_size, PageLedger(pages + 1)) for pages in (self.pages, *self.siblings))
        self.fulls = tuple(FullKV(pool, EvictionOrder(self.policy)) for pool in pools)
        self.tree = RadixTree(self.page_size, self.fulls)

    @property
    def full(self) -> FullKV:
        return self.fulls[0]

    @property
    def pool(self) -> PagePool:
        return self.full.pool

    def evict(self, shortfall: int) -> int:
        """Evicts pages of the first component."""
        return self.tree.evict(self.full, shortfall)

    def insert(self, tokens: Iterable[int], namespace: Namespace = None) -> Node:
        """Inserts whole pages of tokens from the root on; duplicates are freed again."""
        run = int32_bytes(tokens)
        pages = self.pool.alloc(len(run) // 4 // self.page_size, PREVIOUS_OWNER)
        assert pages is not None, "the test's pool is too small"
        added = self.add(self.tree.root(namespace), run, pages)
        self.pool.free(pages[: added.already_there // self.page_size], PREVIOUS_OWNER)
        return added.node

    def add(self, below: Node, run: bytes, *pages: Pages) -> Insertion:
        """Inserts a run below a node, as a request does that depends on it and then ends."""
        self.tree.lock(below)
        added = self.tree.insert(below, run, pages, PREVIOUS_OWNER)
        self.tree.unlock(added.node)
        return added

    def peek(self, tokens: Iterable[int], namespace: Namespace = None) -> int:
        return self.tree.probe(int32_bytes(tokens), namespace).length

    def touch(self, tokens: Iterable[int]) -> Node:
        """A match, as by a passing request."""
        return self.match(int32_bytes(tokens), None)[0]

    def collect(self, node: Node, full: FullKV | None = None) -> NDArray[np.int32]:
        """Pages from the root's end to the node's end, of the first component unless one is given."""
        count = sum(one.length for one in node.path())
        return (full or self.full).collect(node, count)

    def match(self, tokens: bytes, namespace: Namespace) -> tuple[Node, int]:
        """Where the longest cached prefix ends (splitting a node if needed), and its length in tokens."""
        probe = self.tree.probe(tokens, namespace)
        return self.tree.claim(probe), probe.length


def small_cache(
    pages: int = 32, page_size: int = 4, rows: int = 4, context: int = 64, *, reuse: bool = True
) -> KVCache:
    """A cache with a ledger; `pages` does not count the pad page."""
    return KVCache((PoolSpec("full", CacheKind.FULL, pages + 1, page_size),), rows, context, reuse=reuse, debug=True)


def states_of(cache: KVCache) -> StateGroup | None:
    """The group of layers that keep states, if there are any."""
    return next((group for group in cache.groups if isinstance(group, StateGroup)), None)


def compute(cache: KVCache, record: RowKV, tokens: list[int], step: int | None = None) -> None:
    """Does what a prefill of all of `tokens` does to a row: allocate, commit, share."""
    assert cache.extend_row(record, len(tokens))
    cache.lengths.kv_committed[record.row] = len(tokens)
    cache.cache_prefix(record, int32_bytes(tokens), len(tokens), step)


def lengths(record: RowKV) -> tuple[int, int, int]:
    """Protected, committed, allocated."""
    return record.cache_protected_len, record.kv_committed_len, record.kv_allocated_len
