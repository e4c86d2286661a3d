"""The tree of cached prefixes over pages of tokens (RadixAttention, Zheng et al. 2023). A key is a run of whole pages
of int32 token ids, as bytes, so that comparing 8,000 tokens is one memory comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_jax.mem_cache.component import Component
from sglang_jax.mem_cache.ledger import Pages

TOKEN_BYTES = 4

Namespace = str | None
"""KV is shared only within a namespace: an extra key, an adapter, a salt."""


class Node:
    """A run of pages. `values[i]` belongs to the tree's i-th component; a root has an empty key.

    - `length`: pages of the key. `end`: pages from the root to its end. `writer`: serial of the record that computed
      it.
    - `proven`: a finite token was sampled from it. All nodes above a proven node are proven.
    - `locks`: requests and sessions that depend on the prefix that ends here or below; `sessions`: how many are
      sessions. All nodes above a locked node are locked.
    - `dead`: cut off. No match reaches it or its subtree; it exists as long as its locks. `gone`: it was removed, or
      joined to another node.
    """

    __slots__ = (
        "children",
        "created",
        "dead",
        "end",
        "gone",
        "hits",
        "id",
        "key",
        "last_access",
        "length",
        "locks",
        "namespace",
        "parent",
        "proven",
        "sessions",
        "values",
        "writer",
    )

    def __init__(
        self,
        node_id: int,
        key: bytes,
        parent: Node | None,
        namespace: Namespace,
        now: int,
        writer: int = 0,
        length: int = 0,
    ) -> None:
        self.id = node_id
        self.key = key
        self.length = length
        self.end: int = length if parent is None else parent.end + length
        self.parent = parent
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.values: list[Any] = []
        self.created = now
        self.last_access = now
        self.hits = 0
        self.locks = 0
        self.sessions = 0
        self.writer = writer
        self.proven = False
        self.dead = False
        self.gone = False

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Probe:
    """The end of the longest cached prefix: after `covered` pages of `node`, or at its end (`whole`). `length`: of the
    prefix in tokens, whole pages; `known`: tokens for which the tree's keys match; `rank`: of the tree. Valid until the
    tree changes."""

    node: Node
    covered: int
    whole: bool
    length: int
    known: int = 0
    rank: int = 0


@dataclass(slots=True)
class Bookmark:
    """The last probe of a prompt, so that another only visits what has changed since.

    - `node`: the last node whose whole key matches, None before the first probe; `end`: its `end`; `child`: its child
      with which the prompt continues for at least one page, `page`, None if there is none; `child_end`: its `end`.
    - `length`: the longest cached prefix in tokens, for this `limit`. `sure`: it can change only if one of these nodes
      does.
    - `visited`: number of nodes visited so far. `of_ranks`: those in the trees of several ranks; of this one itself,
      only `length` and `visited` are then kept.
    """

    node: Node | None = None
    end: int = 0
    page: bytes = b""
    child: Node | None = None
    child_end: int = 0
    limit: int | None = None
    length: int = 0
    sure: bool = False
    visited: int = 0
    of_ranks: dict[int, Bookmark] = field(default_factory=dict)

    def holds(self, limit: int) -> bool:
        """Whether a probe would find the same `length`."""
        node, child = self.node, self.child
        if not self.sure or node is None or node.gone or node.dead or (node.end, limit) != (self.end, self.limit):
            return False
        return node.children.get(self.page) is child and (child is None or child.end == self.child_end)


@dataclass(frozen=True, slots=True)
class Insertion:
    """The node at whose end an inserted prefix ends, and how many of its tokens were in the tree before."""

    node: Node
    already_there: int


class RadixTree:
    """Keys, splits, matches, locks, recency, eviction and removal, with hooks of all components.

    `probe` changes nothing; `claim` splits the node in which a probe ended and updates recency. Time is a counter, so
    that the order is exact. Nodes are joined again when the places between them are not needed: a conversation is one
    node, however many turns it has. `writing`: serials of records whose KV may still turn out not to be finite.
    """

    def __init__(self, page_size: int, components: tuple[Component, ...], rank: int = 0) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.components = components
        self.rank = rank
        self._partial = [(index, one) for index, one in enumerate(components) if not one.complete]
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0
        self.writing: set[int] = set()
        self._next_id = 1
        self._now = 0
        for component in components:
            component.attach(self)

    @property
    def now(self) -> int:
        return self._now

    def probe(
        self, tokens: bytes, namespace: Namespace, limit: int | None = None, bookmark: Bookmark | None = None
    ) -> Probe:
        """The longest cached prefix, of at most `limit` tokens, at which every component lets a request start. Changes
        only the `bookmark` of these tokens, at which it resumes."""
        root = self.roots.get(namespace)
        if root is None:
            if bookmark is not None:
                bookmark.node, bookmark.length = None, 0
            return Probe(self.root(namespace), 0, True, 0, 0, self.rank)
        size = len(tokens) if limit is None else max(limit, 0) // self.page_size * self.page_bytes
        start = self._resume(root, bookmark, size // self.page_bytes)
        reached = list(self._walk(start, tokens, size, start.end * self.page_bytes))
        if self._partial:
            probe = self._probe_partial(root, start, reached)
        elif not reached:
            probe = Probe(start, start.length, True, start.end * self.page_size, 0, self.rank)
        else:
            node, first, end, whole = reached[-1]
            probe = Probe(node, (end - first) // self.page_bytes, whole, end // TOKEN_BYTES, 0, self.rank)
        if bookmark is not None:
            node = next((node for node, _, _, whole in reversed(reached[-2:]) if whole), start)
            end = node.end * self.page_bytes
            self._set(bookmark, node, tokens[end : min(end + self.page_bytes, size)])
            bookmark.limit, bookmark.length = limit, probe.length
            bookmark.visited += len(reached) + (sum(1 for _ in start.path()) if self._partial else 0)
        return probe

    def _set(self, bookmark: Bookmark, node: Node, page: bytes) -> None:
        child = node.children.get(page)
        bookmark.node, bookmark.end, bookmark.page, bookmark.child = node, node.end, page, child
        bookmark.child_end = 0 if child is None else child.end
        bookmark.sure = not self._partial

    @staticmethod
    def _resume(root: Node, bookmark: Bookmark | None, most: int) -> Node:
        """The last node on a bookmark's path that is still in the tree and ends after at most `most` pages. The prefix
        up to a node's end never changes, though the node may be split, joined to its child or shortened."""
        node = None if bookmark is None else bookmark.node
        while node is not None and node.parent is not None and (node.gone or node.dead or node.end > most):
            node = node.parent
            bookmark.visited += 1  # type: ignore[union-attr]
        return root if node is None or node.parent is None else node

    def _probe_partial(self, root: Node, start: Node, reached: list[tuple[Node, int, int, bool]]) -> Probe:
        """`probe` with components whose nodes may lack pages: visits the path to `start`, and then from there on."""
        passed = [(node, node.length) for node in start.path()]
        passed.reverse()
        passed += [(node, (end - first) // self.page_bytes) for node, first, end, _ in reached]
        known = reached[-1][2] // TOKEN_BYTES if reached else start.end * self.page_size
        last, agreed = len(passed) - 1, False
        while not agreed:
            before = last
            for _, one in self._partial:
                last = one.last_start(passed, last)
            agreed = last == before or len(self._partial) == 1
        if last < 0:
            return Probe(root, 0, True, 0, known, self.rank)
        node, covered = passed[last]
        whole = covered == node.length
        length = (node.end - node.length + covered) * self.page_size
        return Probe(node, covered, whole, length, known, self.rank)

    def claim(self, probe: Probe) -> Node:
        """Returns the node at whose end a probe's prefix ends, for a request to start; splits a node if necessary."""
        self._now += 1
        node = probe.node
        if not probe.whole:
            node = self._split(node, probe.covered * self.page_bytes)
        ancestor = node
        while ancestor.parent is not None:
            ancestor.last_access = self._now
            ancestor.hits += 1
            ancestor = ancestor.parent
        self._touch(node)
        return node

    def insert(
        self, below: Node, tokens: bytes, pages: tuple[Pages, ...], previous_owner: int, writer: int = 0
    ) -> Insertion:
        """Adds the run `tokens` (whole pages) after the prefix that ends at `below`, which is not dead. The inserting
        request's lock moves from `below` to the end of the run.

        `pages`: one array per component, `[pages of the run]`, 0 for no page; the tree takes the arrays over. For the
        part that is in the tree already, components take the pages that they lack. The new part becomes one leaf of
        `writer`, with the remaining pages; `previous_owner` is the code of their owner.
        """
        self._now += 1
        if below.parent is None:
            below = self._root(below.namespace)  # an empty root may have been removed since the match
        node, there = below, 0
        for reached, start, end, whole in self._walk(below, tokens, len(tokens)):
            node = reached if whole else self._split(reached, end - start)
            node.last_access = self._now
            self._lock_one(node)
            for index, component in self._partial:
                component.fill(node, pages[index][start // self.page_bytes : end // self.page_bytes], previous_owner)
            there = end
        if there < len(tokens):
            node = self._add_leaf(node, tokens[there:] if there else tokens, writer)
            first = there // self.page_bytes
            for component, run in zip(self.components, pages, strict=True):
                component.attach_pages(node, run[first:], previous_owner)
        return Insertion(node, there // TOKEN_BYTES)

    def lock(self, node: Node, *, session: bool = False) -> None:
        """Adds a lock of a request, or of a session, on the prefix that ends at `node`."""
        while node.parent is not None:
            if node.locks and not node.sessions:
                node.locks += 1
            else:
                self._lock_one(node)
            if session:
                self._enter_session(node)
            node = node.parent

    def _enter_session(self, node: Node) -> None:
        if node.sessions == 0:
            for component in self.components:
                component.session_begins(node)
        node.sessions += 1
        self._set_spare(node, True)

    def _set_spare(self, node: Node, spare: bool) -> None:
        if 0 < node.locks == node.sessions:
            for component in self.components:
                component.set_spare(node, spare)

    def extend_session(self, held: Node, node: Node) -> bool:
        """Moves a session's lock from `held` down to `node`; False, with nothing changed, if `node` is not below. Costs
        O(nodes between), however long the conversation is."""
        between = []
        each = node
        while each is not held:
            if each.parent is None:
                return False
            between.append(each)
            each = each.parent
        for each in between:
            self._lock_one(each)
            self._enter_session(each)
        return True

    def _lock_one(self, node: Node) -> None:
        if node.locks == 0:
            for component in self.components:
                component.pin(node)
        elif node.sessions:
            self._set_spare(node, False)
        node.locks += 1

    def unlock(self, node: Node, *, session: bool = False) -> None:
        """Takes one `lock` of this node back."""
        if session:
            self._leave_session(node)
        last, loose = node, False
        while last.dead and last.parent is not None:
            last = last.parent
        while node.parent is not None:
            if node.locks <= 0:
                raise RuntimeError(f"tree node {node.id} was unlocked more often than locked")
            node.locks -= 1
            if node.sessions:
                self._set_spare(node, True)
            if node.locks == 0:
                loose = True
                for component in self.components:
                    component.unpin(node)
            node = node.parent
        if loose:
            if self._partial:
                self._prune(last)
            self._give_back()

    def _leave_session(self, node: Node) -> None:
        for each in node.path():
            if each.sessions <= 0:
                raise RuntimeError(f"tree node {each.id} was let go by more sessions than have it")
            self._set_spare(each, False)
            each.sessions -= 1
            if each.sessions == 0:
                for component in self.components:
                    component.session_ends(each)

    def split_path(self, node: Node, length: int, most: int) -> None:
        """Splits the path to `node`, of `length` pages, after `most` pages, so that a prefix may end there."""
        while node.parent is not None and length - node.length > most:
            length -= node.length
            node = node.parent
        if node.parent is not None and length - node.length < most < length and not node.dead:
            self._split(node, (most - length + node.length) * self.page_bytes)

    def last_start(self, node: Node, length: int, most: int) -> tuple[Node, int]:
        """The last place on the path to `node`, of `length` pages, at which a request may start: the end of a node,
        after at most `most` pages, or the root. Returns the node and the pages of the path to its end."""
        while node.parent is not None and (length > most or node.dead or not self._accepts_end(node)):
            length -= node.length
            node = node.parent
        return node, length

    def prove(self, node: Node) -> None:
        """A finite token was sampled from the prefix that ends at `node`: marks its nodes as proven."""
        while not node.proven and node.parent is not None:
            node.proven = True
            node = node.parent

    def cut(self, node: Node) -> None:
        """Cuts off this node and its subtree, so that no match reaches them. Frees nodes without locks at once."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.page_bytes]]
        self._touch(parent)
        lost = [node]
        for each in lost:
            lost.extend(each.children.values())
        for each in lost:
            each.dead = True
            self.num_nodes -= 1
            for component in self.components:
                component.cut_off(each)
        self._drop_empty_root(parent)
        if self._partial:
            self._prune(parent)
        self._give_back()

    def evict(self, component: Component, shortfall: int) -> int:
        """Frees `shortfall` pages of a component, or as many as are evictable, in the order of the policy: leaves from
        their tail, or pages without their node. When a leaf is removed, all components give up their pages of it.
        Returns the number of freed pages: more than the shortfall if the rest of a leaf would be of no use."""
        before = component.evictable
        goal = max(before - shortfall, 0)
        while component.evictable > goal and (node := component.candidate()) is not None:
            keep = component.evict_at(node, component.evictable - goal)
            if keep == 0:
                node = self._remove_leaf(node)
            elif self._join(node) if keep == node.length else self._trim_leaf(node, keep):
                continue
            if self._partial:
                self._prune(node)
        self._give_back()
        return before - component.evictable

    def join_path(self, node: Node, pages: int) -> None:
        """Joins the nodes with the last `pages` pages of the path to `node`, and the node before them, wherever the
        place between two is not needed."""
        seen = node.length
        while seen <= pages and (upper := node.parent) is not None and upper.parent is not None:
            seen += upper.length
            if not self._join(upper):
                node = upper

    def _join(self, upper: Node) -> bool:
        """Joins a node to its only child, whose object stays, as in `_split`. False, with nothing changed, if it has
        other children, a lock on its end, or a component that needs the place."""
        parent = upper.parent
        if parent is None or len(upper.children) != 1 or upper.dead:
            return False
        (lower,) = upper.children.values()
        same = (upper.locks, upper.proven) == (lower.locks, lower.proven)
        if not same or upper.writer in self.writing or lower.writer in self.writing:
            return False
        if not all(component.may_join(upper, lower) for component in self.components):
            return False
        for component in self.components:
            component.join(upper, lower)
        upper.gone = True
        lower.key = upper.key + lower.key
        lower.length += upper.length
        lower.hits = max(upper.hits, lower.hits)
        lower.last_access = max(upper.last_access, lower.last_access)
        lower.parent = parent
        parent.children[lower.key[: self.page_bytes]] = lower
        self.num_nodes -= 1
        return True

    def _prune(self, node: Node) -> None:
        """Removes a leaf without locks at whose end no match may end, since its pages are of no use; then its parent,
        if that has become such a leaf."""
        while (
            node.parent is not None and not (node.children or node.locks or node.dead) and not self._accepts_end(node)
        ):
            node = self._remove_leaf(node)

    def _accepts_end(self, node: Node) -> bool:
        return False not in [component.accepts_end(node) for _, component in self._partial]

    def _remove_leaf(self, node: Node) -> Node:
        """Removes a leaf. Returns its parent."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        assert not node.locks
        node.gone = True
        for component in self.components:
            component.remove(node)
        del parent.children[node.key[: self.page_bytes]]
        self.num_nodes -= 1
        if not parent.children:
            self._touch(parent)
            self._drop_empty_root(parent)
        return parent

    def _trim_leaf(self, node: Node, pages: int) -> bool:
        """Shortens a leaf to `pages` pages. Returns whether a match may end at its new end, as far as the leaf
        shows."""
        assert pages > 0
        assert not node.children
        serves = True
        for component in self.components:
            serves = component.trim(node, pages) and serves
        node.key = node.key[: pages * self.page_bytes]
        node.end -= node.length - pages
        node.length = pages
        return serves

    def _give_back(self) -> None:
        for component in self.components:
            component.give_back()

    def nodes(self) -> Iterator[Node]:
        """All nodes except roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    @staticmethod
    def root(namespace: Namespace) -> Node:
        return Node(0, b"", None, namespace, 0)

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and not node.children and self.roots.get(node.namespace) is node:
            del self.roots[node.namespace]
            node.gone = True

    def _walk(self, node: Node, tokens: bytes, size: int, position: int = 0) -> Iterator[tuple[Node, int, int, bool]]:
        """Nodes below `node` that match the bytes of `tokens` from `position` to `size`: (node, bytes matched before it
        and at its end, whether its whole key matches). A partly matching node comes last, if at least one page
        matches."""
        while position < size:
            child = node.children.get(tokens[position : position + self.page_bytes])
            if child is None:
                return
            if tokens.startswith(child.key, position, size):
                node = child
                start, position = position, position + len(child.key)
                yield child, start, position, True
            else:
                yield child, position, position + self._common(child.key, tokens, position, size), False
                return

    def _common(self, key: bytes, tokens: bytes, position: int, end: int) -> int:
        size = min(len(key), end - position)
        ours = np.frombuffer(key, np.int32, size // TOKEN_BYTES)
        theirs = np.frombuffer(tokens, np.int32, size // TOKEN_BYTES, position)
        different = ours != theirs
        same = int(different.argmax()) if different.any() else len(ours)
        return same // self.page_size * self.page_bytes

    def _split(self, lower: Node, size: int) -> Node:
        """Splits a node after `size` bytes. The node object keeps the lower part, so that locks on it stay valid."""
        parent = lower.parent
        assert parent is not None
        assert 0 < size < len(lower.key)
        upper = self._new_node(lower.key[:size], parent, lower.namespace, lower.writer)
        upper.created, upper.hits, upper.last_access = lower.created, lower.hits, lower.last_access
        upper.proven, upper.locks, upper.sessions = lower.proven, lower.locks, lower.sessions
        parent.children[upper.key[: self.page_bytes]] = upper
        lower.key = lower.key[size:]
        lower.length -= upper.length
        lower.parent = upper
        upper.children[lower.key[: self.page_bytes]] = lower
        for component in self.components:
            component.split(upper, lower)
        return upper

    def _add_leaf(self, parent: Node, key: bytes, writer: int) -> Node:
        """A new leaf with the lock of the inserting request, which also has one on the parent."""
        leaf = self._new_node(key, parent, parent.namespace, writer)
        leaf.locks = 1
        parent.children[key[: self.page_bytes]] = leaf
        return leaf

    def _new_node(self, key: bytes, parent: Node, namespace: Namespace, writer: int) -> Node:
        node = Node(self._next_id, key, parent, namespace, self._now, writer, len(key) // self.page_bytes)
        self._next_id += 1
        self.num_nodes += 1
        return node

    def _root(self, namespace: Namespace) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self.root(namespace)
        return root

    def _touch(self, node: Node) -> None:
        if node.parent is None:
            return
        for component in self.components:
            component.touch(node)
