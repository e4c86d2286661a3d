"""The contents of the prefix cache, for operators: sizes, uses and owners, without the text of prompts."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable

import msgspec

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.invariants import page_balance
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


def summarize_cache(cache: KVCache) -> CacheSummary:
    """Takes a bounded time, however large the tree is."""
    return CacheSummary(
        page_size=cache.page_size,
        num_nodes=cache.tree.num_nodes,
        num_namespaces=len(cache.tree.roots),
        groups=[_pool(cache, group) for group in cache.groups],
        nodes=[_node(cache, node) for node in _most_used(cache.tree.roots.values())],
    )


def _pool(cache: KVCache, group: Group) -> PoolSummary:
    balance = page_balance(cache, group)
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


def report_cache(cache: KVCache, sessions: Iterable[Session], now: float | None = None) -> CacheReport:
    """Visits every node once: about 0.1 s for ten thousand. `now`: by the sessions' clock."""
    nodes = list(cache.tree.nodes())
    return CacheReport(
        page_size=cache.page_size,
        num_nodes=len(nodes),
        num_namespaces=len(cache.tree.roots),
        groups=_groups(cache, nodes),
        nodes=[_node(cache, node) for node in _chosen(nodes)],
        sessions=[_session(cache, one, time.monotonic() if now is None else now) for one in sessions],
    )


def _groups(cache: KVCache, nodes: list[Node]) -> list[GroupReport]:
    reports = []
    for group in cache.groups:
        balance = page_balance(cache, group)
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
                tombstones=sum(not len(group.component.pages(node)) for node in nodes),
            )
        )
    return reports


def _unit(group: Group) -> str:
    return "slot" if group.unit == "slot" else "page"


def _chosen(nodes: list[Node]) -> list[Node]:
    """The nodes with the most tokens and uses, and their ancestors; each after its parent."""
    chosen: dict[int, Node] = {}
    for node in heapq.nlargest(MAX_NODES, nodes, key=lambda one: (one.length * (1 + one.hits), -one.id)):
        path = [one for one in node.path() if one.id not in chosen]
        if len(chosen) + len(path) <= MAX_NODES:
            chosen.update({one.id: one for one in reversed(path)})
    return list(chosen.values())


def _node(cache: KVCache, node: Node) -> NodeReport:
    return NodeReport(
        id=node.id,
        parent=0 if node.parent is None else node.parent.id,
        tokens=node.length * cache.page_size,
        hits=node.hits,
        age=cache.tree.now - node.last_access,
        requests=node.locks - node.sessions,
        sessions=node.sessions,
        proven=node.proven,
        pages=[len(group.component.pages(node)) for group in cache.groups],
    )


def _session(cache: KVCache, session: Session, now: float) -> SessionReport:
    return SessionReport(
        id=session.id,
        owner=session.owner,
        tokens=len(session.tokens) // 4,
        kept_tokens=session.pin.pages * cache.page_size,
        idle_seconds=None if session.turn is not None else now - session.used_at,
        timeout=session.timeout,
    )
