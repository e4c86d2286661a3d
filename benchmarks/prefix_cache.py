"""Prefix tree of 10,000 nodes, prompts of 8k tokens: match, insert, and eviction of one page.

    python benchmarks/prefix_cache.py [--json FILE]

Targets, medians: match at most 200 us, insert 300 us, eviction of one page (amortised over 2,000) 20 us. The tree holds
conversations: families of prompts that branch every few hundred tokens, so that a path has tens of nodes. A second
group, of layers with a window of 1,024 tokens, should make each at most 1.5 times as slow; its pages are evicted then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import report

from sglang_jax.architectures import CacheKind
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES
from sglang_jax.runner.plan import PoolSpec

PROMPT = 8192
NODES = 10_000
REPEATS = 200
WINDOW = 1024


def build(page_size: int, window: int | None, numbers: random.Random) -> tuple[KVCache, list[np.ndarray]]:
    """A cache whose tree has `NODES` nodes, and the prompts that are in it (`[PROMPT]` each)."""
    pages = 12_000_000 // page_size
    pools = [PoolSpec(CacheKind.FULL, pages, page_size)]
    if window is not None:
        pools.append(PoolSpec(CacheKind.WINDOW, pages, page_size, window))
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


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e6


def measure(page_size: int, window: int | None) -> dict[str, object]:
    """Medians in microseconds on one tree."""
    numbers = random.Random(1)
    cache, prompts = build(page_size, window, numbers)
    nodes = cache.tree.num_nodes
    depth = statistics.mean(len(list(cache.tree.probe(p.tobytes(), None).node.path())) for p in prompts[-200:])
    matches, inserts = [], []
    for _ in range(REPEATS):
        tokens = numbers.choice(prompts).tobytes()
        matches.append(timed(lambda tokens=tokens: cache.tree.claim(cache.tree.probe(tokens, None))))
        fresh = np.frombuffer(tokens, np.int32).copy()
        fresh[numbers.randrange(PROMPT // 2, PROMPT) :] = 50_001
        record = cache.open_row(cache.probe(fresh.tobytes(), PROMPT - 1, None))
        assert cache.extend_row(record, PROMPT)
        cache.lengths.kv_committed[record.row] = PROMPT
        data = fresh.tobytes()
        inserts.append(timed(lambda record=record, data=data: cache.cache_prefix(record, data, PROMPT, None)))
        cache.release_kv_cache(record, b"", insert=False)
    count = 2000
    eviction = timed(lambda: [cache.tree.evict(cache.groups[-1].component, 1) for _ in range(count)] and None) / count
    return {
        "page size": page_size,
        "groups": 2 if window else 1,
        "nodes": nodes,
        "mean depth": depth,
        "prompt tokens": len(prompts[0].tobytes()) // TOKEN_BYTES,
        "match us": statistics.median(matches),
        "insert us": statistics.median(inserts),
        "evict page us": eviction,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    report(
        "Prefix cache",
        [measure(page_size, window) for page_size in (1, 16, 64) for window in (None, WINDOW)],
        arguments.json,
    )


if __name__ == "__main__":
    main()
