"""The contents of the prefix cache, for operators: sizes, uses and owners, without the text of prompts."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Iterable

import msgspec

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.invariants import PageBalance, page_balance
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import Node
from sglang_jax.scheduler.sessions import Session

MAX_NODES = 256
"""Maximum nodes in a report: those with the most tokens and uses, and their ancestors."""

SUMMARY_NODES = 96
"""Maximum nodes in a summary: those on which the most requests and sessions depend, then those with the most hits."""

VISITED_NODES = 2048
"""Maximum nodes that a summary visits. Of a node's children, it visits the newest first."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pages, or slots, of one cache group by owner; they add up to `total`. `tombstones`: nodes without pages of this
    group."""

    name: str
    unit: str
    total: int
    free: int
    evictable: int
    session: int
    protected: int
    request_owned: int
    retired: int
    tombstones: int


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the tree. `parent`: its id, 0 for a root; `hits`: matches that include the node; `age`: uses of the
    tree since its last use; `requests`, `sessions`: how many depend on it; `pages`: of each group."""

    id: int
    parent: int
    tokens: int
    hits: int
    age: int
    requests: int
    sessions: int
    proven: bool
    pages: list[int]


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """An open session. `tokens`: of its finished turns; `kept_tokens`: those protected from eviction; `idle_seconds`:
    since its last turn, None while a turn runs or waits."""

    id: str
    owner: str
    tokens: int
    kept_tokens: int
    idle_seconds: float | None
    timeout: float


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one core. `num_nodes`: of the tree; `nodes`: some; `num_namespaces`: parts that share no pages."""

    page_size: int
    num_nodes: int
    num_namespaces: int
    groups: list[GroupReport]
    nodes: list[NodeReport]
    sessions: list[SessionReport]


class PoolSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Pages, or slots, of one cache group by owner; they add up to `total`. `used`: by requests; `session`: kept by
    sessions; `cached`: evictable."""

    name: str
    unit: str
    total: int
    free: int
    cached: int
    session: int
    used: int


class CacheSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one core in a few numbers. `num_nodes`: of the tree; `nodes`: the most used, each after its
    parent."""

    page_size: int
    num_nodes: int
    num_namespaces: int
    groups: list[PoolSummary]
    nodes: list[NodeReport]


def summarize_cache(cache: AnyCache) -> CacheSummary:
    """Takes a bounded time, however large the tree is."""
    trees = [one.tree for one in cache.ranks]
    return CacheSummary(
        page_size=cache.page_size,
        num_nodes=sum(tree.num_nodes for tree in trees),
        num_namespaces=len({name for tree in trees for name in tree.roots}),
        groups=[_pool(cache, index, group) for index, group in enumerate(cache.ranks[0].groups)],
        nodes=[_node(one, node, len(trees)) for one in cache.ranks for node in _most_used(one.tree.roots.values())],
    )


def _balance(cache: AnyCache, index: int) -> PageBalance:
    """The pages of a group by owner, on all ranks."""
    each = [page_balance(one, one.groups[index]) for one in cache.ranks]
    return PageBalance(*(sum(numbers) for numbers in zip(*map(dataclasses.astuple, each), strict=True)))


def _pool(cache: AnyCache, index: int, group: Group) -> PoolSummary:
    balance = _balance(cache, index)
    return PoolSummary(
        name=group.name,
        unit=_unit(group),
        total=balance.total,
        free=balance.free,
        cached=balance.evictable,
        session=balance.session,
        used=balance.protected + balance.request_owned + balance.retired,
    )


def _most_used(roots: Iterable[Node]) -> list[Node]:
    """A child has at most the locks and hits of its parent, so the best of the nodes below those already chosen is the
    best of all others."""
    chosen: list[Node] = []
    below: list[tuple[int, int, int, Node]] = []
    left = VISITED_NODES

    def visit(parent: Node) -> None:
        nonlocal left
        for child in itertools.islice(reversed(parent.children.values()), left):
            left -= 1
            heapq.heappush(below, (-child.locks, -child.hits, child.id, child))

    for root in itertools.islice(roots, VISITED_NODES):
        visit(root)
    while below and len(chosen) < SUMMARY_NODES:
        node = heapq.heappop(below)[-1]
        chosen.append(node)
        visit(node)
    return chosen


def report_cache(cache: AnyCache, sessions: Iterable[Session], now: float | None = None) -> CacheReport:
    """Visits every node once: about 0.1 s for ten thousand. `now`: by the sessions' clock."""
    nodes = [(one, node) for one in cache.ranks for node in one.tree.nodes()]
    return CacheReport(
        page_size=cache.page_size,
        num_nodes=len(nodes),
        num_namespaces=len({name for one in cache.ranks for name in one.tree.roots}),
        groups=_groups(cache, nodes),
        nodes=[_node(one, node, len(cache.ranks)) for one, node in _chosen(nodes)],
        sessions=[_session(cache, one, time.monotonic() if now is None else now) for one in sessions],
    )


def _groups(cache: AnyCache, nodes: list[tuple[KVCache, Node]]) -> list[GroupReport]:
    reports = []
    for index, group in enumerate(cache.ranks[0].groups):
        balance = _balance(cache, index)
        reports.append(
            GroupReport(
                name=group.name,
                unit=_unit(group),
                total=balance.total,
                free=balance.free,
                evictable=balance.evictable,
                session=balance.session,
                protected=balance.protected,
                request_owned=balance.request_owned,
                retired=balance.retired,
                tombstones=sum(not len(one.groups[index].component.pages(node)) for one, node in nodes),
            )
        )
    return reports


def _unit(group: Group) -> str:
    return "slot" if group.unit == "slot" else "page"


def _chosen(nodes: list[tuple[KVCache, Node]]) -> list[tuple[KVCache, Node]]:
    """The nodes with the most tokens and uses, and their ancestors; each after its parent."""
    chosen: dict[tuple[int, int], tuple[KVCache, Node]] = {}

    def worth(found: tuple[KVCache, Node]) -> tuple[int, int, int]:
        cache, node = found
        return node.length * (1 + node.hits), -node.id, -cache.rank

    for cache, node in heapq.nlargest(MAX_NODES, nodes, key=worth):
        path = [one for one in node.path() if (cache.rank, one.id) not in chosen]
        if len(chosen) + len(path) <= MAX_NODES:
            chosen.update({(cache.rank, one.id): (cache, one) for one in reversed(path)})
    return list(chosen.values())


def _node(cache: KVCache, node: Node, ranks: int) -> NodeReport:
    """`ranks`: their number; ids of nodes differ through all of them."""

    def id_of(one: Node | None) -> int:
        return 0 if one is None or not one.id else (one.id - 1) * ranks + cache.rank + 1

    return NodeReport(
        id=id_of(node),
        parent=id_of(node.parent),
        tokens=node.length * cache.page_size,
        hits=node.hits,
        age=cache.tree.now - node.last_access,
        requests=node.locks - node.sessions,
        sessions=node.sessions,
        proven=node.proven,
        pages=[len(group.component.pages(node)) for group in cache.groups],
    )


def _session(cache: AnyCache, session: Session, now: float) -> SessionReport:
    return SessionReport(
        id=session.id,
        owner=session.owner,
        tokens=len(session.tokens) // 4,
        kept_tokens=session.pin.pages * cache.page_size,
        idle_seconds=None if session.turn is not None else now - session.used_at,
        timeout=session.timeout,
    )
