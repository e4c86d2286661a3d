"""Checks of page ownership: cheap ones for every step, and a full recount for tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.group import Group, WindowGroup
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import Node
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.state_group import StateGroup


class InvariantError(AssertionError):
    """Pages do not add up: a defect of the engine."""


@dataclass(frozen=True, slots=True)
class PageBalance:
    """The pages of a pool by owner, which add up to `total` exactly. `session`: pages of the tree that sessions keep,
    with or without requests; `protected`: that only requests keep."""

    free: int
    evictable: int
    session: int
    protected: int
    request_owned: int
    retired: int
    total: int

    @property
    def balanced(self) -> bool:
        in_tree = self.evictable + self.session + self.protected
        return self.free + in_tree + self.request_owned + self.retired == self.total


def page_balance(cache: KVCache, group: Group) -> PageBalance:
    """The balance by the running totals, O(rows)."""
    return PageBalance(
        free=group.pool.num_free,
        evictable=group.component.evictable,
        session=group.component.session,
        protected=group.component.protected - group.component.session,
        request_owned=sum(_owned_pages(cache, group, record) for record in cache.open_rows.values()),
        retired=group.retired_pages,
        total=group.pool.total,
    )


def check_conservation(cache: AnyCache) -> None:
    """Raises `InvariantError` if a page is lost or counted twice, on any rank. Cheap enough for every step."""
    for one in cache.ranks:
        for group in one.groups:
            balance = page_balance(one, group)
            if not balance.balanced:
                raise InvariantError(f"pages of group {group.name}{_of_rank(cache, one)} do not add up: {balance}")


def _of_rank(cache: AnyCache, one: KVCache) -> str:
    return "" if len(cache.ranks) == 1 else f" on rank {one.rank}"


def idle_fault(cache: AnyCache) -> str:
    """Describes pages that do not add up while no request has a row and no step is in flight; empty if all do. O(1) for
    each rank."""
    return next((fault + _of_rank(cache, one) for one in cache.ranks if (fault := _idle_fault(one))), "")


def _idle_fault(cache: KVCache) -> str:
    for group in cache.groups:
        session = group.component.session
        if group.available + session != group.pool.total or cache.open_rows or not cache.all_rows_free:
            return (
                f"group {group.name}: {group.pool.num_free} pages free, {group.component.evictable} evictable and "
                f"{session} kept for sessions of {group.pool.total}, {group.component.protected - session} protected, "
                f"{group.retired_pages} retired, rows in use: {sorted(cache.open_rows)}"
            )
    return ""


def check_everything(cache: AnyCache) -> None:
    """Recounts locks, totals and owners from the tree and the rows, of each rank. Raises `InvariantError`. O(pages +
    nodes): for tests."""
    check_conservation(cache)
    for one in cache.ranks:
        _check_one(one)
    rows = sorted(row for one in cache.ranks for row in one.open_rows)
    _require(rows == sorted(cache.open_rows), f"rows {sorted(cache.open_rows)} are open, those of the ranks are {rows}")
    for one in cache.ranks:
        mine = {row for row in one.open_rows if cache.of_row(row) is one}
        _require(mine == set(one.open_rows), f"rank {one.rank} has rows {sorted(one.open_rows)}, not all its own")


def _check_one(cache: KVCache) -> None:
    dead = _dead_nodes(cache)
    _check_nodes(cache)
    for record in cache.open_rows.values():
        _check_record(cache, record)
    for group in cache.groups:
        if isinstance(group, WindowGroup):
            _check_window(cache, group, dead)
        elif isinstance(group.component, FullKV):
            _check_full(cache, group.component, dead)
        if isinstance(group, StateGroup):
            _check_states(cache, group, dead)
        else:
            for record in cache.open_rows.values():
                _check_table(cache, group, record)
        _check_single_owner(cache, group, dead)


def _dead_nodes(cache: KVCache) -> list[Node]:
    """Nodes that were cut off but that some row or pin still depends on."""
    paths = (node.path() for node in (*_locked_by_rows(cache), *_locked_by_pins(cache)))
    return list({node.id: node for path in paths for node in path if node.dead}.values())


def _locked_by_rows(cache: KVCache) -> list[Node]:
    return [record.locked_node for record in cache.open_rows.values()]


def _locked_by_pins(cache: KVCache) -> list[Node]:
    return [pin.node for pin in cache.pins.held if pin.node is not None]


def _owned_pages(cache: KVCache, group: Group, record: RowKV) -> int:
    return len(group.owned(record, cache.pages_for(record.kv_allocated_len)))


def _length(cache: KVCache, node: Node) -> int:
    return len(node.key) // cache.tree.page_bytes


def _pages_to(cache: KVCache, node: Node) -> int:
    above = 0 if node.parent is None else node.parent.end
    return above + _length(cache, node)


def _check_nodes(cache: KVCache) -> None:
    sessions = Counter(ancestor.id for node in _locked_by_pins(cache) for ancestor in node.path())
    locks = Counter(ancestor.id for node in _locked_by_rows(cache) for ancestor in node.path()) + sessions
    for pin in cache.pins.held:
        pages = 0 if pin.node is None else sum(_length(cache, node) for node in pin.node.path())
        _require(0 < pages == pin.pages, f"a pin of {pin.pages} pages keeps {pages}")
    count = 0
    for node in cache.tree.nodes():
        count += 1
        _require(node.length == _length(cache, node), f"node {node.id}: counted as {node.length} pages")
        _require(node.end == _pages_to(cache, node), f"node {node.id}: counted to end after {node.end} pages")
        _require(not node.gone, f"node {node.id} was removed and can be reached")
        _require(not node.dead, f"node {node.id} was cut off and can be reached")
        _require(not node.proven or _is_proven(node.parent), f"node {node.id}: proven alone")
        _require(
            node.locks == locks[node.id], f"node {node.id}: {node.locks} locks, {locks[node.id]} requests and pins"
        )
        _require(
            node.sessions == sessions[node.id], f"node {node.id}: {node.sessions} sessions, {sessions[node.id]} pins"
        )
        _require(_is_linked(cache, node), f"node {node.id} is not its parent's child")
    _require(count == cache.tree.num_nodes, f"{count} nodes, counted as {cache.tree.num_nodes}")


def _check_full(cache: KVCache, full: FullKV, dead: list[Node]) -> None:
    evictable = 0
    protected = sum(len(full.pages(node)) for node in dead)
    session = sum(len(full.pages(node)) for node in (*cache.tree.nodes(), *dead) if node.sessions)
    _require(session == full.session, f"{session} pages are kept for sessions, counted as {full.session}")
    spare = sum(len(full.pages(node)) for node in (*cache.tree.nodes(), *dead) if 0 < node.locks == node.sessions)
    _require(spare == full.spare, f"{spare} pages are kept by sessions alone, counted as {full.spare}")
    for node in cache.tree.nodes():
        pages = full.pages(node)
        _require(len(pages) == _length(cache, node), f"node {node.id}: key and pages differ")
        leaf = not node.children and node.locks == 0
        _require((node in full.order) == leaf, f"node {node.id}: evictable leaf is {leaf}, the order says otherwise")
        if node.locks:
            protected += len(pages)
        else:
            evictable += len(pages)
    _require((evictable, protected) == (full.evictable, full.protected), "evictable or protected pages miscounted")


_NO_COVERS: Counter[int] = Counter()


def _check_window(cache: KVCache, group: WindowGroup, dead: list[Node]) -> None:
    window = group.component
    covers: dict[int, Counter[int]] = {}
    for record in cache.open_rows.values():
        count = record.cache_protected_len // cache.page_size - group.held_from(record.row)
        for node in record.locked_node.path():
            if count <= 0:
                break
            covers.setdefault(node.id, Counter())[min(count, _length(cache, node))] += 1
            count -= _length(cache, node)
    pinned = _covered_by_pins(cache, group)
    for node_id, counts in pinned.items():
        covers.setdefault(node_id, Counter()).update(counts)
    evictable = protected = session = spare = 0
    for node in (*cache.tree.nodes(), *dead):
        held = window.held(node)
        kept = pinned.get(node.id, _NO_COVERS)
        if held.session_covers != kept or held.kept != max(kept, default=0):
            raise InvariantError(f"node {node.id}: kept {held.kept} {held.session_covers}, pins {dict(kept)}")
        session += held.kept
        by_requests = covers.get(node.id, _NO_COVERS) - kept
        spare += max(held.kept - max(by_requests, default=0), 0)
        expected = covers.get(node.id, _NO_COVERS)
        if held.covers != expected or held.covered != max(expected, default=0):
            raise InvariantError(f"node {node.id}: covered {held.covered} {held.covers}, requests {dict(expected)}")
        if not (held.covered <= len(held.pages) <= _length(cache, node) and 0 <= held.proven <= len(held.pages)):
            raise InvariantError(f"node {node.id} of {_length(cache, node)} pages: {held}")
        protected += held.covered
        loose = 0 if node.dead else len(held.pages) - held.covered
        evictable += loose
        if (node in window.order) != (loose > 0):
            raise InvariantError(f"node {node.id}: {loose} loose pages, the order differs")
        if not (len(held.pages) or node.children or node.locks or node.dead):
            raise InvariantError(f"node {node.id}: a leaf without its window that nobody depends on")
    _require((evictable, protected) == (window.evictable, window.protected), "evictable or protected pages miscounted")
    _require(session == window.session, f"{session} pages are kept for sessions, counted as {window.session}")
    _require(spare == window.spare, f"{spare} pages are kept by sessions alone, counted as {window.spare}")


def _covered_by_pins(cache: KVCache, group: WindowGroup) -> dict[int, Counter[int]]:
    """By node id: how many of its last pages pins cover, as counts."""
    covers: dict[int, Counter[int]] = {}
    for pin in cache.pins.held:
        count, node = min(pin.pages, group.reach), pin.node
        while count > 0 and node is not None:
            covers.setdefault(node.id, Counter())[min(count, _length(cache, node))] += 1
            count -= _length(cache, node)
            node = node.parent
    return covers


def _check_states(cache: KVCache, group: StateGroup, dead: list[Node]) -> None:
    states, sessions = group.component, Counter(node.id for node in _locked_by_pins(cache))
    pins = group.pins() + sessions
    evictable = protected = session = spare = 0
    for node in (*cache.tree.nodes(), *dead):
        snapshot = states.snapshot(node)
        pinned = 0 if snapshot is None else snapshot.pins
        if pinned != pins.pop(node.id, 0):
            raise InvariantError(f"node {node.id}: its state is pinned {pinned} times, rows and sessions say otherwise")
        kept = 0 if snapshot is None else snapshot.sessions
        _require(
            kept == sessions[node.id], f"node {node.id}: its state is kept for {kept} sessions, {sessions[node.id]}"
        )
        session += kept > 0
        spare += 0 < pinned == kept
        _require(not pinned or node.locks > 0, f"node {node.id}: its state is pinned, and nobody depends on it")
        loose = snapshot is not None and not pinned
        _require(not (loose and node.dead), f"node {node.id} was cut off and keeps a state that nobody has pinned")
        _require((node in states.order) == loose, f"node {node.id}: its state is loose: {loose}, the order differs")
        evictable += loose
        protected += pinned > 0
        leaf = not (node.children or node.locks or node.dead)
        _require(not leaf or snapshot is not None, f"node {node.id}: a leaf without a state that nobody depends on")
    _require(not pins, f"states of nodes {sorted(pins)} are pinned, which are gone")
    _require((evictable, protected) == (states.evictable, states.protected), "evictable or pinned states miscounted")
    _require(session == states.session, f"{session} states are kept for sessions, counted as {states.session}")
    _require(spare == states.spare, f"{spare} states are kept by sessions alone, counted as {states.spare}")
    for record in cache.open_rows.values():
        _require(group.table.pages[record.row, 0] > 0, f"row {record.row} has no slot")


def _is_proven(node: Node | None) -> bool:
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
    _require(record.locked_node.namespace == record.namespace, f"{name}: depends on a prefix of another namespace")


def _check_table(cache: KVCache, group: Group, record: RowKV) -> None:
    name, row = f"row {record.row} of group {group.name}", record.row
    first, last = group.held_from(row), record.cache_protected_len // cache.page_size
    allocated = cache.pages_for(record.kv_allocated_len)
    _require(0 <= first <= max(allocated, 1), f"{name}: holds columns from {first} on, of {allocated}")
    rest = group.table.pages[row, allocated:]
    _require(not rest.any(), f"{name}: the table names pages beyond {record.kv_allocated_len} tokens")
    own = group.table.run(row, max(first, last), allocated)
    _require(bool((own > 0).all()), f"{name}: the pad page is owned")
    if first < last:
        shared = group.component.collect(record.locked_node, last - first)
        _require(
            np.array_equal(shared, group.table.run(row, first, last)),
            f"{name}: the table differs from the tree within [0, {record.cache_protected_len})",
        )


def _check_single_owner(cache: KVCache, group: Group, dead: list[Node]) -> None:
    owned = [group.pool.free_pages(), *group.retired]
    owned += [group.component.pages(node) for node in (*cache.tree.nodes(), *dead)]
    owned += [group.owned(record, cache.pages_for(record.kv_allocated_len)) for record in cache.open_rows.values()]
    pages = np.concatenate(owned)
    unique = np.unique(pages)
    _require(len(unique) == len(pages), "a page has two owners")
    _require(len(pages) == group.pool.total, "a page has no owner")
    _require(not len(unique) or unique[0] > 0, "the pad page is owned")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
