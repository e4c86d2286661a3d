"""Sizes of decode: of its blocks, of what is computed of them, of groups of rows, and of buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST_DEPTH, _MOST_DEPTH = 4, 8
_BYTES_OF_BUFFERS = 16 << 20

_PARTS = (1, 2, 4)
"""What is computed of a block: all of it, a half or a quarter."""

_FEWEST_KEYS, _KEYS_OF_SHORT = 128, 512
"""That are computed of a block: a whole register of scores for each head; and where rows come in groups, what a short
row has at most: a row's result is the same in a group and by itself, as the same is computed."""

_ROWS_TOGETHER, _BYTES_OF_GROUP = 8, 2 << 20
"""Of a group, and of its keys and values at most: there are up to eight buffers for them."""

_MOST_PAGE_NUMBERS = 128 << 10
"""Of rows that are taken in groups, half of the scalar memory: where contexts are longer, rows are taken one by one."""


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Rows per program and pages per block of keys."""

    rows: int
    pages: int


def depth_of(block_bytes: int, vmem_limit: int) -> int:
    """Blocks that there are buffers for. With two, what memory delivers while a copy is on its way is lost: by a model
    of the pipeline (`tpu.kernel_costs`) half of it for one kv head of Qwen3-32B on v6e, and almost nothing with four.
    Rows of a few hundred keys fill a part of each, and need more. All take half of the vector memory at most, but for
    the two that any pipeline needs."""
    wanted = min(max(_BYTES_OF_BUFFERS // block_bytes, _LEAST_DEPTH), _MOST_DEPTH)
    return min(wanted, max(vmem_limit // 2 // block_bytes, 2))


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of `rows` rows that share a block if each has `pages` pages or fewer; of one row: there are none."""

    rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows from the size of blocks.

    - `computed`: the pages of a block that are computed at once, most first: all, and of a row's last block fewer.
    - `groups`: of rows as short as the least of these. What one row waits for others fill.
    - `pages_per_buffer`, `depth`: of the buffers.
    """

    computed: tuple[int, ...]
    groups: Groups
    pages_per_buffer: int
    depth: int


def sizes_of(blocks: DecodeBlocks, page_size: int, page_bytes: int, columns: int, vmem_limit: int) -> Sizes:
    """For pages of `page_bytes`, `columns` of them in a row of the page table, and so much vector memory.

    What is computed of a block does not depend on the rows of a program: a batch of few rows has the same results.
    """
    short = min(max(_KEYS_OF_SHORT // page_size, 1), blocks.pages)
    room = min(_BYTES_OF_GROUP, vmem_limit // 16) // (short * page_bytes)
    most = min(_ROWS_TOGETHER, 1 << max(room.bit_length() - 1, 0))
    if depth_of(most * short * page_bytes, vmem_limit) * most * columns > _MOST_PAGE_NUMBERS:
        most = 1
    fewest = short if most > 1 else -(-_FEWEST_KEYS // page_size)
    computed = tuple(blocks.pages // part for part in _PARTS if part == 1 or blocks.pages // part >= fewest)
    groups = Groups(math.gcd(blocks.rows, most), computed[-1])
    pages_per_buffer = max(blocks.pages, groups.rows * groups.pages)
    return Sizes(computed, groups, pages_per_buffer, depth_of(pages_per_buffer * page_bytes, vmem_limit))
