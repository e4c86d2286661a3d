"""A bookmark finds the same match as a walk from the root, after any changes of the tree."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from helpers.caches import int32_bytes
from helpers.scheduling import Bench

from sglang_jax.mem_cache.radix_tree import Bookmark, Node, RadixTree
from sglang_jax.sampling.params import SamplingParams


def run_prompts(seed: int, **sizes: object) -> int:
    """Prompts that branch, run and are evicted, and some that only look up. Returns how often a kept bookmark was still
    valid."""
    choice = random.Random(seed)
    bench = Bench(**{"pages": 40, "page_size": 2, "rows": 3, "chunk": 8, "budget": 16, "context": 60, **sizes})
    cache, held = bench.scheduler.cache, 0
    looking = [([choice.randint(1, 2) for _ in range(24)], Bookmark()) for _ in range(12)]
    for step in range(160):
        if len(bench.scheduler.queue) < 2:
            tokens = [choice.randint(1, 2) for _ in range(choice.randint(1, 24))]
            if choice.random() < 0.5:
                tokens = choice.choice(looking)[0][: choice.randint(2, 24)]
            bench.add(tokens, sampling=SamplingParams(max_new_tokens=choice.randint(1, 4), seed=5))
        bench.scheduler.step()
        if step % 40 == 39:
            bench.run()
            assert step % 80 < 40 or bench.scheduler.flush_cache()
        for tokens, bookmark in choice.sample(looking, 6):
            limit = choice.choice([24, 24, 24, 11])
            wanted = cache.peek(int32_bytes(tokens), limit, None)
            held += bookmark.holds(limit)
            assert cache.peek(int32_bytes(tokens), limit, None, bookmark) == wanted
            found, anew = (cache.probe(int32_bytes(tokens), limit, None, one) for one in (bookmark, None))
            assert (found.length, found.covered, found.whole, found.known) == (
                anew.length,
                anew.covered,
                anew.whole,
                anew.known,
            )
            assert found.node is anew.node or found.node.parent is anew.node.parent is None
    return held


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", [{}, {"window": 6}], ids=["full", "window"])
def test_a_bookmark_finds_the_same_match_as_a_walk_from_the_root(seed: int, sizes: dict[str, object]) -> None:
    held = run_prompts(seed, **sizes)
    assert (held > 100) == (not sizes)


def run_seeds() -> None:
    for seed in range(6):
        run_prompts(seed)


def forget_that_nodes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RadixTree, "_resume", staticmethod(lambda root, bookmark, most: (bookmark and bookmark.node) or root)
    )


def forget_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def holds(self: Bookmark, limit: int) -> bool:
        return self.sure and isinstance(self.node, Node) and not self.node.gone and limit == self.limit

    monkeypatch.setattr(Bookmark, "holds", holds)


def forget_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may be shortened, and another page follow where it ends now."""
    holds = Bookmark.holds

    def holds_at_any_end(self: Bookmark, limit: int) -> bool:
        self.end = self.end if self.node is None else self.node.end
        return holds(self, limit)

    monkeypatch.setattr(Bookmark, "holds", holds_at_any_end)


def forget_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    holds = Bookmark.holds
    monkeypatch.setattr(Bookmark, "holds", lambda self, limit: holds(self, self.limit))


@pytest.mark.parametrize("plant", [forget_that_nodes_go, forget_the_child, forget_the_end, forget_the_limit])
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_seeds()
