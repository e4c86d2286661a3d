"""Prefixes that were computed, as a tree over pages of tokens.

A key is a run of whole pages of int32 token ids, held as bytes so that comparing 8,000 tokens is one memory comparison.
RadixAttention (Zheng et al. 2023) over pages; what a node holds is its components' business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.component import Component
from sglang_jax.mem_cache.ledger import Pages

TOKEN_BYTES = 4

Namespace = str | None
"""KV is shared only within one: an extra key, an adapter, a salt."""


class Node:
    """A run of pages. `values[i]` belongs to the tree's i-th component; a root has an empty key."""

    __slots__ = ("children", "created", "hits", "id", "key", "last_access", "namespace", "parent", "values")

    def __init__(self, node_id: int, key: bytes, parent: Node | None, namespace: Namespace, now: int) -> None:
        self.id = node_id
        self.key = key
        self.parent = parent
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.values: list[object] = []
        self.created = now
        self.last_access = now
        self.hits = 0

    def path(self) -> Iterator[Node]:
        """This node, its parent, and so on, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest node that holds a prefix, and the prefix's length in tokens (whole pages)."""

    node: Node
    length: int


@dataclass(frozen=True, slots=True)
class Insertion:
    """Where an inserted prefix ends, and how many tokens of it were there before."""

    node: Node
    already_there: int


class RadixTree:
    """Keys, splits, matches and recency.

    `peek` reads only; `match` splits nodes so that it ends at a node's end and refreshes recency. Time is a counter,
    not a clock, so that order is exact.
    """

    def __init__(self, page_size: int, components: tuple[Component, ...]) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.components = components
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0
        self._next_id = 1
        self._now = 0
        for component in components:
            component.attach(self)

    def peek(self, tokens: bytes, namespace: Namespace) -> int:
        """Tokens of the longest cached prefix, in whole pages. Changes nothing."""
        node = self.roots.get(namespace)
        if node is None:
            return 0
        accepted = 0
        for reached, end, whole in self._walk(node, tokens):
            if all(component.accepts_boundary(reached, whole) for component in self.components):
                accepted = end
        return accepted // TOKEN_BYTES

    def match(self, tokens: bytes, namespace: Namespace) -> Match:
        """The longest cached prefix at which every component lets a request start."""
        self._now += 1
        root = self.roots.get(namespace) or self.root(namespace)
        best = Match(root, 0)
        visited: list[Node] = []
        covered = 0
        for node, end, whole in self._walk(root, tokens):
            reached = node if whole else self._split(node, end - covered)
            visited.append(reached)
            covered = end
            if all(component.accepts_boundary(reached, True) for component in self.components):
                best = Match(reached, end // TOKEN_BYTES)
        for node in visited:
            node.last_access = self._now
            node.hits += 1
        if visited:
            self._touch(visited[-1])
        return best

    def insert(self, below: Node, tokens: bytes, pages: tuple[Pages, ...], giver: int) -> Insertion:
        """Adds the run `tokens` (whole pages) after the prefix that ends at `below`.

        The part that is there already is left alone. What is new becomes one leaf whose components adopt the rest of
        `pages` (one array per component, `[pages of the run]`) from the owner with code `giver`.
        """
        self._now += 1
        if below.parent is None:
            below = self._root(below.namespace)  # an empty root may have been dropped since it was matched
        node, there = below, 0
        for reached, end, whole in self._walk(below, tokens):
            node = reached if whole else self._split(reached, end - there)
            node.last_access = self._now
            there = end
        if there < len(tokens):
            node = self._add_leaf(node, tokens[there:])
            first = there // self.page_bytes
            for component, run in zip(self.components, pages, strict=True):
                component.adopt(node, run[first:], giver)
        self._touch(node)
        return Insertion(node, there // TOKEN_BYTES)

    def lock(self, node: Node) -> None:
        """A request starts to depend on the prefix that ends at `node`."""
        for component in self.components:
            component.lock(node)

    def unlock(self, node: Node) -> None:
        """Takes one `lock` of this node back."""
        for component in self.components:
            component.unlock(node)

    def remove_leaf(self, node: Node) -> None:
        """Takes a childless node out; called by a component once nothing is held there."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self.page_bytes]]
        self.num_nodes -= 1
        self._touch(parent)
        if parent.parent is None and not parent.children:
            del self.roots[parent.namespace]

    def trim_leaf(self, node: Node, pages: int) -> None:
        """Shortens a leaf's key to its first `pages` (at least one) pages."""
        assert pages > 0
        assert not node.children
        node.key = node.key[: pages * self.page_bytes]

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    @staticmethod
    def root(namespace: Namespace) -> Node:
        """Where the empty prefix ends."""
        return Node(0, b"", None, namespace, 0)

    def _walk(self, node: Node, tokens: bytes) -> Iterator[tuple[Node, int, bool]]:
        """Nodes below `node` along `tokens`: (node, bytes of `tokens` covered at its end, whether all of its key is).

        A partly covered node comes last, and only if at least one of its pages is covered.
        """
        position, size = 0, len(tokens)
        while position < size:
            child = node.children.get(tokens[position : position + self.page_bytes])
            if child is None:
                return
            if tokens.startswith(child.key, position):
                node = child
                position += len(child.key)
                yield child, position, True
            else:
                yield child, position + self._common(child.key, tokens, position), False
                return

    def _common(self, key: bytes, tokens: bytes, position: int) -> int:
        """Bytes of whole pages that `key` shares with `tokens` from `position` on; they differ somewhere."""
        size = min(len(key), len(tokens) - position)
        ours = np.frombuffer(key, np.int32, size // TOKEN_BYTES)
        theirs = np.frombuffer(tokens, np.int32, size // TOKEN_BYTES, position)
        different = ours != theirs
        same = int(different.argmax()) if different.any() else len(ours)
        return same // self.page_size * self.page_bytes

    def _split(self, lower: Node, size: int) -> Node:
        """Divides a node after `size` bytes. The node object keeps the lower part, so that locks on it still hold."""
        parent = lower.parent
        assert parent is not None
        assert 0 < size < len(lower.key)
        upper = self._new_node(lower.key[:size], parent, lower.namespace)
        upper.created, upper.hits, upper.last_access = lower.created, lower.hits, lower.last_access
        parent.children[upper.key[: self.page_bytes]] = upper
        lower.key = lower.key[size:]
        lower.parent = upper
        upper.children[lower.key[: self.page_bytes]] = lower
        for component in self.components:
            component.split(upper, lower, size // self.page_bytes)
        return upper

    def _add_leaf(self, parent: Node, key: bytes) -> Node:
        leaf = self._new_node(key, parent, parent.namespace)
        parent.children[key[: self.page_bytes]] = leaf
        self._touch(parent)
        return leaf

    def _new_node(self, key: bytes, parent: Node, namespace: Namespace) -> Node:
        node = Node(self._next_id, key, parent, namespace, self._now)
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
