"""Freeing a request's memory: by page ids, as the pool does, and by token indices, as other allocators do.

    python benchmarks/page_frees.py [--turns N] [--json FILE]

Each row frees the pages of some tokens, scattered over a pool of 262,144 tokens, in three ways that take turns; figures
are medians of processor time in microseconds, on one thread:

- `pool`: `PagePool.free`, which writes the page ids to its stack and finds double frees.
- `unique and cat`: the request has an index for each token; their pages are made unique, which sorts them, and are
  joined with the list of free pages, which copies it.
- `cat`: page ids are joined with the list of free pages, and nothing is checked.

The last two are in torch on the CPU. On a device, `unique` has to wait for it as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import report

from sglang_jax.mem_cache.page_pool import PagePool

POOL = 262_144
TOKENS = (4096, 65_536)
PAGE_SIZES = (1, 16, 64)
OWNER = 0


def scattered_pool(page_size: int) -> PagePool:
    """A pool of `POOL` tokens that hands out its pages in random order."""
    pool = PagePool(POOL // page_size + 1, page_size)
    pages = pool.alloc(pool.total, OWNER)
    assert pages is not None
    pool.free(np.random.default_rng(1).permutation(pages), OWNER)
    return pool


def timed(action: Callable[[], object]) -> float:
    """Microseconds of processor time."""
    start = time.thread_time()
    action()
    return (time.thread_time() - start) * 1e6


def turn(pool: PagePool, num_pages: int) -> tuple[float, float, float]:
    """Frees the same pages in all three ways, which must end with the same free ones. Returns the microseconds of
    each."""
    pages = pool.alloc(num_pages, OWNER)
    assert pages is not None
    free = torch.from_numpy(pool.free_pages().astype(np.int64))
    page_ids = torch.from_numpy(pages.astype(np.int64))
    indices = (page_ids[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()
    after: list[torch.Tensor] = []
    microseconds = (
        timed(lambda: pool.free(pages, OWNER)),
        timed(lambda: after.append(torch.cat((torch.unique(indices // pool.page_size), free)))),
        timed(lambda: after.append(torch.cat((page_ids, free)))),
    )
    expected = np.sort(pool.free_pages())
    assert all(np.array_equal(expected, np.sort(each.numpy())) for each in after)
    return microseconds


def measure(num_tokens: int, page_size: int, turns: int) -> dict[str, object]:
    """One row of the table."""
    pool = scattered_pool(page_size)
    ways = zip(*(turn(pool, num_tokens // page_size) for _ in range(turns)), strict=True)
    by_pool, by_index, unchecked = map(statistics.median, ways)
    return {
        "tokens": num_tokens,
        "page size": page_size,
        "pool us": by_pool,
        "unique and cat us": by_index,
        "cat us": unchecked,
        "unique and cat / pool": by_index / by_pool,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=101, help="frees in each row")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(num_tokens, page_size, arguments.turns) for num_tokens in TOKENS for page_size in PAGE_SIZES]
    report("Frees of pages", rows, arguments.json)


if __name__ == "__main__":
    main()
