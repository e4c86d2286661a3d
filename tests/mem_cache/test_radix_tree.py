"""The prefix tree, checked against a dictionary of page runs."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.caches import PREVIOUS_OWNER, SmallTree, int32_bytes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.radix_tree import Namespace, Node, RadixTree

A, B, C, D = ([10 * k + i for i in range(4)] for k in range(1, 5))
"""A tree with pages of four tokens."""


def snapshot(tree: RadixTree) -> list[Any]:
    """Everything that a read may not change."""
    nodes = sorted(tree.nodes(), key=lambda node: node.id)
    return [
        list(tree.roots),
        tree.num_nodes,
        [(n.id, n.key, n.created, n.last_access, n.hits, list(n.children), repr(n.values)) for n in nodes],
    ]


class TestByHand:
    def test_a_match_counts_whole_pages_only(self) -> None:
        small = SmallTree()
        small.insert(A + B)
        assert small.peek(A + B) == 8
        assert small.peek(A + B[:3]) == 4
        assert small.peek([*A, *B[:3], 99]) == 4
        assert small.peek(A[:3]) == 0
        assert small.peek(B) == 0
        assert small.peek([]) == 0

    def test_an_insert_returns_how_much_was_already_cached(self) -> None:
        """The caller frees exactly these duplicates: a number off by one page leaks or frees twice."""
        small = SmallTree()
        small.insert(A + B + C)
        for run, there in ((A + B + C, 12), (A + B + D, 8), (A + B, 8), (D, 0), (A + B + C + D, 12)):
            pages = small.pool.alloc(len(run) // 4, PREVIOUS_OWNER)
            assert pages is not None
            added = small.add(small.tree.root(None), int32_bytes(run), pages)
            assert added.already_there == there
            small.pool.free(pages[: there // 4], PREVIOUS_OWNER)
            found = small.collect(added.node)
            assert len(found) == len(run) // 4
            assert found[there // 4 :].tolist() == pages[there // 4 :].tolist()

    def test_an_insert_below_a_matched_node_walks_from_there(self) -> None:
        small = SmallTree()
        small.insert(A + B)
        below = small.match(int32_bytes(A), None)[0]
        pages = small.pool.alloc(2, PREVIOUS_OWNER)
        assert pages is not None
        added = small.add(below, int32_bytes(B + C), pages)
        assert added.already_there == 4
        assert small.peek(A + B + C) == 12
        small.pool.free(pages[:1], PREVIOUS_OWNER)

    def test_a_match_inside_a_node_splits_it_and_a_peek_does_not(self) -> None:
        small = SmallTree()
        lower = small.insert(A + B + C)
        pages = small.collect(lower).tolist()
        assert small.peek(A + B + D) == 8
        assert small.tree.num_nodes == 1
        matched, length = small.match(int32_bytes(A + B + D), None)
        assert length == 8
        assert small.tree.num_nodes == 2
        assert lower.parent is matched
        assert small.collect(matched).tolist() == pages[:2]
        assert small.collect(lower).tolist() == pages
        small.match(int32_bytes(A + B + D), None)
        assert small.tree.num_nodes == 2

    def test_a_lock_survives_a_split(self) -> None:
        """A lock is on a node: after a split it must still cover, and later release, the whole prefix."""
        small = SmallTree()
        locked_node = small.insert(A + B + C)
        small.tree.lock(locked_node)
        upper = small.match(int32_bytes(A), None)[0]
        assert upper is not locked_node
        assert (small.full.protected, small.full.evictable) == (3, 0)
        assert small.evict(3) == 0
        small.tree.lock(upper)
        small.tree.unlock(locked_node)
        assert (small.full.protected, small.full.evictable) == (1, 2)
        small.tree.unlock(upper)
        assert (small.full.protected, small.full.evictable) == (0, 3)

    def test_unlocking_more_often_than_locking_is_an_error(self) -> None:
        small = SmallTree()
        node = small.insert(A)
        small.tree.lock(node)
        small.tree.unlock(node)
        with pytest.raises(RuntimeError, match=f"tree node {node.id} was unlocked more often than locked"):
            small.tree.unlock(node)

    def test_namespaces_share_nothing(self) -> None:
        """KV of another adapter or tenant gives wrong output, or leaks prompts."""
        small = SmallTree()
        small.insert(A + B, "mine")
        small.insert(A + C, None)
        assert small.peek(A + B, "mine") == 8
        assert small.peek(A + B, None) == 4
        assert small.peek(A + B, "") == 0
        assert small.peek(A + B, "other") == 0

    def test_a_lookup_leaves_no_empty_root_behind(self) -> None:
        """Namespaces come from requests: a root for each namespace ever requested would grow without bound."""
        small = SmallTree()
        for k in range(50):
            assert small.peek(A, f"user {k}") == 0
            assert small.match(int32_bytes(A), f"user {k}")[1] == 0
        assert not small.tree.roots

    def test_a_root_is_removed_with_its_last_child(self) -> None:
        small = SmallTree()
        small.insert(A + B, "mine")
        small.insert(A + C, "mine")
        small.insert(A, "other")
        assert set(small.tree.roots) == {"mine", "other"}
        small.evict(4)
        assert not small.tree.roots
        assert small.tree.num_nodes == 0

    def test_an_insert_below_a_root_that_was_dropped_is_found(self) -> None:
        """Regression: a request matched nothing, its namespace was emptied meanwhile, and its insert was attached to a
        removed root."""
        small = SmallTree()
        small.insert(A, "mine")
        root = small.match(int32_bytes(B), "mine")[0]
        small.evict(1)
        assert not small.tree.roots
        pages = small.pool.alloc(1, PREVIOUS_OWNER)
        assert pages is not None
        small.add(root, int32_bytes(B), pages)
        assert small.peek(B, "mine") == 4


Path = tuple[int, ...]
Held = tuple[int, ...]


class TreeModel(RuleBasedStateMachine):
    """The model maps (namespace, run of whole pages' tokens) to the pages that hold the run's last page, one for each
    of the tree's groups, whose pools have different sizes.

    A cached prefix of n pages is n entries; a match is as long as entries follow one another.
    """

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        policy=st.sampled_from(EvictionPolicy),
        siblings=st.sampled_from([(), (60,), (120, 40)]),
    )
    def start(self, page_size: int, policy: EvictionPolicy, siblings: tuple[int, ...]) -> None:
        self.small = SmallTree(page_size, 96, policy, siblings)
        self.model: dict[tuple[Namespace, Path], Held] = {}
        self.locked: list[tuple[Node, Namespace, Path]] = []

    namespaces = st.sampled_from([None, "other"])
    letters = st.lists(st.integers(0, 2), max_size=7)
    """Pages by name: page k's tokens are all k but the last, which tells pages with the same start apart."""

    def tokens(self, letters: list[int], extra: int = 0) -> Path:
        size = self.small.page_size
        return tuple(t for k in letters for t in ([7] * (size - 1) + [k])) + (7,) * min(extra, size - 1)

    def prefixes(self, tokens: Path) -> list[Path]:
        size = self.small.page_size
        return [tokens[:end] for end in range(size, len(tokens) + 1, size)]

    def modelled(self, tokens: Path, namespace: Namespace) -> list[Held]:
        """Pages of the longest cached prefix."""
        pages: list[Held] = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.model:
                break
            pages.append(self.model[namespace, prefix])
        return pages

    @rule(letters=letters.filter(bool), namespace=namespaces, below=st.integers(0, 7))
    def insert(self, letters: list[int], namespace: Namespace, below: int) -> None:
        """Inserts below what a match of the first few pages found, as a request does."""
        size = self.small.page_size
        tokens = self.tokens(letters)
        start, already = self.match_prefix(tokens[: below * size], namespace)
        run = tokens[already:]
        count = len(run) // size
        if not run or any(full.pool.num_free < count for full in self.small.fulls):
            return
        pages = tuple(full.pool.alloc(count, PREVIOUS_OWNER) for full in self.small.fulls)
        known = self.modelled(tokens, namespace)
        added = self.small.add(start, int32_bytes(run), *pages)
        assert already + added.already_there == len(known) * size
        duplicates = added.already_there // size
        for full, taken in zip(self.small.fulls, pages, strict=True):
            full.pool.free(taken[:duplicates], PREVIOUS_OWNER)
        new = zip(*(taken[duplicates:].tolist() for taken in pages), strict=True)
        self.model |= dict(zip(((namespace, one) for one in self.prefixes(tokens)[len(known) :]), new, strict=True))
        assert self.collected(added.node) == self.modelled(tokens, namespace)

    def collected(self, node: Node) -> list[Held]:
        return list(zip(*(self.small.collect(node, full).tolist() for full in self.small.fulls), strict=True))

    @rule(letters=letters, namespace=namespaces, extra=st.integers(0, 15))
    def peek(self, letters: list[int], namespace: Namespace, extra: int) -> None:
        tokens = self.tokens(letters, extra)
        before = snapshot(self.small.tree)
        found = self.small.peek(tokens, namespace)
        assert found == len(self.modelled(tokens, namespace)) * self.small.page_size
        assert snapshot(self.small.tree) == before

    @rule(letters=letters, namespace=namespaces, extra=st.integers(0, 15))
    def match(self, letters: list[int], namespace: Namespace, extra: int) -> None:
        self.match_prefix(self.tokens(letters, extra), namespace)

    def match_prefix(self, tokens: Path, namespace: Namespace) -> tuple[Node, int]:
        peeked = self.small.peek(tokens, namespace)
        node, length = self.small.match(int32_bytes(tokens), namespace)
        known = self.modelled(tokens, namespace)
        assert length == peeked == len(known) * self.small.page_size
        assert self.collected(node) == known
        assert b"".join(reversed([one.key for one in node.path()])) == int32_bytes(tokens[:length])
        return node, length

    @rule(letters=letters, namespace=namespaces)
    def lock(self, letters: list[int], namespace: Namespace) -> None:
        tokens = self.tokens(letters)
        node, length = self.match_prefix(tokens, namespace)
        self.small.tree.lock(node)
        self.locked.append((node, namespace, tokens[:length]))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        self.small.tree.unlock(self.locked.pop(index)[0])

    @rule(shortfall=st.integers(0, 12), group=st.integers(0, 2))
    def evict(self, shortfall: int, group: int) -> None:
        """Pages of one group; those of the other groups are evicted with them."""
        full = self.small.fulls[group % len(self.small.fulls)]
        evictable = full.evictable
        free_before = set(full.pool.free_pages().tolist())
        assert self.small.tree.evict(full, shortfall) == min(shortfall, evictable)
        freed = set(full.pool.free_pages().tolist()) - free_before
        assert len(freed) == min(shortfall, evictable)
        place = self.small.fulls.index(full)
        self.model = {key: pages for key, pages in self.model.items() if pages[place] not in freed}
        for _, namespace, tokens in self.locked:
            assert len(self.modelled(tokens, namespace)) * self.small.page_size == len(tokens)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """A node and all below it are out of reach; who depends on one of them keeps its pages."""
        node = data.draw(st.sampled_from(sorted(self.small.tree.nodes(), key=lambda one: one.id)))
        key = b"".join(reversed([one.key for one in node.path()]))
        path = tuple(memoryview(key).cast("i").tolist())
        above = len(path) - len(node.key) // 4
        if any(
            namespace == node.namespace and tokens[: above + 1] == path[: above + 1]
            for _, namespace, tokens in self.locked
        ):
            return
        self.small.tree.cut(node)
        first = path[: above + self.small.page_size]
        self.model = {
            (namespace, tokens): pages
            for (namespace, tokens), pages in self.model.items()
            if namespace != node.namespace or tokens[: len(first)] != first
        }

    @invariant()
    def same_content(self) -> None:
        """Walking the tree gives the model's entries, each once; so what was evicted was the end of something."""
        tree, size = self.small.tree, self.small.page_size
        content: dict[tuple[Namespace, Path], Held] = {}
        for node in tree.nodes():
            key = b"".join(reversed([ancestor.key for ancestor in node.path()]))
            tokens = tuple(memoryview(key).cast("i").tolist())
            pages = list(zip(*(full.pages(node).tolist() for full in self.small.fulls), strict=True))
            for index, held in enumerate(pages):
                content[node.namespace, tokens[: len(tokens) - (len(pages) - 1 - index) * size]] = held
        assert content == self.model
        assert all(root.children for root in tree.roots.values()), "an empty root"
        locked = {(namespace, prefix) for _, namespace, tokens in self.locked for prefix in self.prefixes(tokens)}
        for full in self.small.fulls:
            assert full.pool.num_free + len(self.model) == full.pool.total
            assert full.protected == len(locked)
            assert full.evictable == len(self.model) - len(locked)


TestAgainstModel = TreeModel.TestCase
TestAgainstModel.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
