"""Prefix tree of 10,000 nodes, prompts of 8k tokens: match, insert, and eviction of one page.

    python benchmarks/prefix_cache.py [--json FILE]

Targets, medians: match at most 200 us, insert 300 us, eviction of one page (amortised over 2,000) 20 us. The tree holds
conversations: families of prompts that branch every few hundred tokens, so that a path has tens of nodes. A second
group, of layers with a window of 1,024 tokens, should make each at most 1.5 times as slow. Trees with and without it
alternate, and all figures are processor time, so that other programs matter little.

Each eviction asks for one page of the pool that `evicts` names. `evict call us` is the time of a call, and `evict
page us` the time per page that it frees, of all pools: an evicted leaf frees its pages in both groups, so a page of
full attention comes with one of the window, and a leaf with a partly freed window is evicted with all its pages,
which serve the next calls.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import report

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.runner.plan import PoolSpec

PROMPT = 8192
NODES = 10_000
REPEATS = 200
EVICTIONS = 2000
AT_A_TIME = 50
WINDOW = 1024


def build(page_size: int, window: int | None, numbers: random.Random) -> tuple[KVCache, list[np.ndarray]]:
    """A cache whose tree has `NODES` nodes, and the prompts in it (`[PROMPT]` each)."""
    pages = 12_000_000 // page_size
    pools = [PoolSpec("full", CacheKind.FULL, pages, page_size)]
    if window is not None:
        pools.append(PoolSpec("swa", CacheKind.WINDOW, pages, page_size, window))
    cache = KVCache(tuple(pools), 8, PROMPT + page_size)
    prompts: list[np.ndarray] = []
    while cache.tree.num_nodes < NODES:
        prompt = np.random.default_rng(numbers.getrandbits(32)).integers(1, 50_000, PROMPT, dtype=np.int32)
        if prompts and numbers.random() < 0.95:
            parent, shared = numbers.choice(prompts), numbers.randrange(PROMPT * 3 // 4, PROMPT - 64)
            prompt[:shared] = parent[:shared]
        prompts.append(prompt)
        compute(cache, prompt)
    return cache, prompts


def compute(cache: KVCache, prompt: np.ndarray) -> None:
    """Runs a prompt through its whole life, as the scheduler would."""
    record = cache.open_row(cache.probe(prompt.tobytes(), len(prompt) - 1, None))
    assert cache.extend_row(record, len(prompt))
    cache.lengths.kv_committed[record.row] = len(prompt)
    cache.release_kv_cache(record, prompt.tobytes(), insert=True)


def timed(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e6


class Subject:
    """One tree, and the microseconds of each operation on it."""

    def __init__(self, page_size: int, window: int | None, evicts: int) -> None:
        self.evicts = evicts
        self._numbers = random.Random(1)
        self.window = window
        self.cache, self.prompts = build(page_size, window, self._numbers)
        paths = [self.cache.tree.probe(prompt.tobytes(), None).node.path() for prompt in self.prompts[-200:]]
        self.nodes, self.depth = self.cache.tree.num_nodes, statistics.mean(len(list(path)) for path in paths)
        self.matches: list[float] = []
        self.inserts: list[float] = []
        self.calls: list[float] = []
        self.freed = 0

    def match_and_insert(self) -> None:
        """Matches a cached prompt, and inserts one that diverges in its second half."""
        cache, numbers = self.cache, self._numbers
        tokens = numbers.choice(self.prompts).tobytes()
        self.matches.append(timed(lambda: cache.tree.claim(cache.tree.probe(tokens, None))))
        fresh = np.frombuffer(tokens, np.int32).copy()
        fresh[numbers.randrange(PROMPT // 2, PROMPT) :] = 50_001
        data = fresh.tobytes()
        record = cache.open_row(cache.probe(data, PROMPT - 1, None))
        assert cache.extend_row(record, PROMPT)
        cache.lengths.kv_committed[record.row] = PROMPT
        self.inserts.append(timed(lambda: cache.cache_prefix(record, data, PROMPT, None)))
        cache.release_kv_cache(record, b"", insert=False)

    def evict(self) -> None:
        """Evicts one page of one pool, a number of times."""
        tree, component = self.cache.tree, self.cache.groups[self.evicts].component
        before = self._num_free()

        def evict() -> None:
            for _ in range(AT_A_TIME):
                tree.evict(component, 1)

        self.calls.append(timed(evict) / AT_A_TIME)
        self.freed += self._num_free() - before

    def _num_free(self) -> int:
        """Free pages of all pools."""
        return sum(group.pool.num_free for group in self.cache.groups)


def measure(page_size: int) -> list[dict[str, object]]:
    """Without a window, and with one and either pool evicted, in alternation: medians in microseconds, and means for
    evictions."""
    subjects = [Subject(page_size, window, evicts) for window, evicts in ((None, 0), (WINDOW, 0), (WINDOW, 1))]
    gc.collect()
    gc.freeze()  # otherwise the garbage collector would scan one tree in the figures of the other
    for _ in range(REPEATS):
        for subject in subjects:
            subject.match_and_insert()
    for subject in subjects * (EVICTIONS // AT_A_TIME):
        subject.evict()
    gc.unfreeze()
    return [
        {
            "page size": page_size,
            "groups": len(subject.cache.groups),
            "evicts": subject.cache.groups[subject.evicts].name,
            "nodes": subject.nodes,
            "mean depth": subject.depth,
            "prompt tokens": PROMPT,
            "match us": statistics.median(subject.matches),
            "insert us": statistics.median(subject.inserts),
            "evict call us": statistics.mean(subject.calls),
            "evict page us": sum(subject.calls) * AT_A_TIME / subject.freed,
        }
        for subject in subjects
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    report(
        "Prefix cache",
        [row for page_size in (1, 16, 64) for row in measure(page_size)],
        arguments.json,
    )


if __name__ == "__main__":
    main()
