"""What must hold of the pages at every step, and a check that recounts it from the ground up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.kv_cache import KVCache, RowKV
from sglang_jax.mem_cache.radix_tree import Node


class InvariantError(AssertionError):
    """The books do not balance: a defect of the engine."""


@dataclass(frozen=True, slots=True)
class PageBalance:
    """Where the pages of a pool are: `free + evictable + protected + request_owned + retired == total`, exactly."""

    free: int
    evictable: int
    protected: int
    request_owned: int
    retired: int
    total: int

    @property
    def balanced(self) -> bool:
        return self.free + self.evictable + self.protected + self.request_owned + self.retired == self.total


def page_balance(cache: KVCache) -> PageBalance:
    """Counts from the running totals, O(rows)."""
    return PageBalance(
        free=cache.pool.num_free,
        evictable=cache.full.evictable,
        protected=cache.full.protected,
        request_owned=sum(_owned_pages(cache, record) for record in cache.open_rows.values()),
        retired=cache.retired_pages,
        total=cache.pool.total,
    )


def check_conservation(cache: KVCache) -> None:
    """**Raises:** `InvariantError` if a page is lost or counted twice. Cheap enough for every step."""
    balance = page_balance(cache)
    if not balance.balanced:
        raise InvariantError(f"pages do not add up: {balance}")


def idle_fault(cache: KVCache) -> str:
    """What is wrong with the books while no request has a row and no step is in flight; empty if nothing is. O(1)."""
    free, evictable, total = cache.pool.num_free, cache.full.evictable, cache.pool.total
    if free + evictable == total and not cache.open_rows and cache.all_rows_free:
        return ""
    return (
        f"{free} pages free and {evictable} evictable of {total}, {cache.full.protected} protected, "
        f"{cache.retired_pages} retired, rows in use: {sorted(cache.open_rows)}"
    )


def check_everything(cache: KVCache) -> None:
    """Recounts locks, totals and owners from the tree and the rows, trusting no running total.

    **Raises:** `InvariantError` naming what differs. O(pages + nodes): for tests.
    """
    check_conservation(cache)
    locks = Counter(ancestor.id for record in cache.open_rows.values() for ancestor in record.receipt.path())
    dead = _dead_nodes(cache)
    _check_nodes(cache, cache.full, locks, dead)
    for record in cache.open_rows.values():
        _check_record(cache, record)
    _check_single_owner(cache, dead)


def _dead_nodes(cache: KVCache) -> list[Node]:
    """Nodes that were cut off and that some row still depends on."""
    paths = (record.receipt.path() for record in cache.open_rows.values())
    return list({node.id: node for path in paths for node in path if node.dead}.values())


def _owned_pages(cache: KVCache, record: RowKV) -> int:
    return cache.pages_for(record.kv_allocated_len) - record.cache_protected_len // cache.page_size


def _check_nodes(cache: KVCache, full: FullKV, locks: Counter[int], dead: list[Node]) -> None:
    evictable = count = 0
    protected = sum(len(full.held(node).pages) for node in dead)
    for node in cache.tree.nodes():
        held = full.held(node)
        count += 1
        _require(not node.dead, f"node {node.id} was cut off and can be reached")
        _require(not node.proven or _is_proven(node.parent), f"node {node.id}: proven alone")
        _require(len(held.pages) * cache.tree.page_bytes == len(node.key), f"node {node.id}: key and pages differ")
        _require(held.locks == locks[node.id], f"node {node.id}: {held.locks} locks, {locks[node.id]} requests")
        _require(_is_linked(cache, node), f"node {node.id} is not its parent's child")
        leaf = not node.children and held.locks == 0
        _require((node in full.order) == leaf, f"node {node.id}: evictable leaf is {leaf}, the order says otherwise")
        if held.locks:
            protected += len(held.pages)
        else:
            evictable += len(held.pages)
    _require((evictable, protected) == (full.evictable, full.protected), "evictable or protected pages miscounted")
    _require(count == cache.tree.num_nodes, f"{count} nodes, counted as {cache.tree.num_nodes}")


def _is_proven(node: Node | None) -> bool:
    """Of a node, or of the empty prefix."""
    return node is None or node.parent is None or node.proven


def _is_linked(cache: KVCache, node: Node) -> bool:
    parent = node.parent
    return parent is not None and parent.children.get(node.key[: cache.tree.page_bytes]) is node


def _check_record(cache: KVCache, record: RowKV) -> None:
    protected, committed, allocated = (
        record.cache_protected_len,
        record.kv_committed_len,
        record.kv_allocated_len,
    )
    name = f"row {record.row}"
    _require(0 <= protected <= committed <= allocated, f"{name}: lengths {protected}, {committed}, {allocated}")
    _require(protected % cache.page_size == 0, f"{name}: cache_protected_len {protected} is not page aligned")
    _require(record.receipt.namespace == record.namespace, f"{name}: depends on a prefix of another namespace")
    rest = cache.table.pages[record.row, cache.pages_for(allocated) :]
    _require(not rest.any(), f"{name}: the table names pages beyond {allocated} tokens")
    shared = cache.full.collect(record.receipt)
    row = cache.table.run(record.row, 0, protected // cache.page_size)
    _require(np.array_equal(shared, row), f"{name}: the table differs from the tree within [0, {protected})")


def _check_single_owner(cache: KVCache, dead: list[Node]) -> None:
    owned = [cache.pool.free_pages(), *cache.retired]
    owned += [cache.full.held(node).pages for node in (*cache.tree.nodes(), *dead)]
    for record in cache.open_rows.values():
        first = record.cache_protected_len // cache.page_size
        owned.append(cache.table.run(record.row, first, cache.pages_for(record.kv_allocated_len)))
    pages = np.concatenate(owned)
    unique = np.unique(pages)
    _require(len(unique) == len(pages), "a page has two owners")
    _require(len(pages) == cache.pool.total, "a page has no owner")
    _require(not len(unique) or unique[0] > 0, "the pad page is owned")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
