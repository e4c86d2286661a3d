"""Sizes of the decode kernel: blocks, the computed parts of them, groups of rows, and buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_DEPTH, _MAX_DEPTH = 4, 8
_BYTES_OF_BUFFERS = 16 << 20

_QUARTERS = (4, 3, 2, 1)
"""The parts of a block that may be computed, in quarters."""

_FEWEST_KEYS, _KEYS_OF_SHORT = 128, 512
"""The smallest number of keys that is computed, and of which others are multiples: a whole register of scores per head;
and the maximum keys of a short row in groups, so that a row has the same result in a group and by itself."""

_SCORES_OF_A_RUN = 128 << 10
"""Scores that are computed together, 128 registers. More would be spilled, and keep the vector units waiting: a run's
products take place during the softmax of the one before."""

_ROWS_TOGETHER, _BYTES_OF_GROUP = 8, 2 << 20
"""The largest group of rows, and the largest size of its keys and values, of which there are up to eight buffers."""

_MAX_PAGE_NUMBERS = 128 << 10
"""Page numbers of grouped rows that fit into half of the scalar memory; with longer contexts, rows are not grouped."""


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Rows per program and pages per block of keys."""

    rows: int
    pages: int


def depth_of(block_bytes: int, vmem_limit: int) -> int:
    """The number of buffers. Two lose the bandwidth of a copy's latency: half of it for one kv head of Qwen3-32B on
    v6e, by a model of the pipeline; four lose almost nothing. Rows of a few hundred keys fill only part of a buffer and
    need more. Buffers take half of the vector memory at most, except for the two that any pipeline needs."""
    wanted = min(max(_BYTES_OF_BUFFERS // block_bytes, _MIN_DEPTH), _MAX_DEPTH)
    return min(wanted, max(vmem_limit // 2 // block_bytes, 2))


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of `rows` rows that share a block if each has `pages` pages or fewer; 1: rows are not grouped."""

    rows: int
    pages: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that follow from those of blocks: numbers of pages that can be computed together, in descending order (a
    whole block, and parts of it for a row's last block); groups of rows with no more pages than the smallest of these,
    in which one row's latencies are filled by others; the size and number of buffers."""

    computed: tuple[int, ...]
    groups: Groups
    pages_per_buffer: int
    depth: int


def sizes_of(blocks: DecodeBlocks, page_size: int, page_bytes: int, columns: int, vmem_limit: int) -> Sizes:
    """Sizes for pages of `page_bytes` bytes, page tables of `columns` columns, and `vmem_limit` bytes of vector memory.
    The computed part of a block does not depend on the rows per program, so small batches have the same results."""
    short = min(max(_KEYS_OF_SHORT // page_size, 1), blocks.pages)
    room = min(_BYTES_OF_GROUP, vmem_limit // 16) // (short * page_bytes)
    most = min(_ROWS_TOGETHER, 1 << max(room.bit_length() - 1, 0))
    if depth_of(most * short * page_bytes, vmem_limit) * most * columns > _MAX_PAGE_NUMBERS:
        most = 1
    fewest = short if most > 1 else -(-_FEWEST_KEYS // page_size)
    computed = _computed(blocks.pages, fewest, page_size)
    groups = Groups(math.gcd(blocks.rows, most), computed[-1])
    pages_per_buffer = max(blocks.pages, groups.rows * groups.pages)
    return Sizes(computed, groups, pages_per_buffer, depth_of(pages_per_buffer * page_bytes, vmem_limit))


def _computed(pages: int, fewest: int, page_size: int) -> tuple[int, ...]:
    """All of a block of `pages` pages, and its parts that are whole pages and registers, of `fewest` pages or more."""
    parts = [divmod(pages * quarters, 4) for quarters in _QUARTERS[1:]]
    whole = [part for part, rest in parts if not rest and part * page_size % _FEWEST_KEYS == 0]
    return (pages, *(part for part in whole if part >= fewest))


def runs_of(pages: int, page_size: int, heads: int) -> list[tuple[int, int]]:
    """Cuts a computed part of a block, for `heads` query heads, into runs of pages: first page and number of pages."""
    most = max(_SCORES_OF_A_RUN // heads // _FEWEST_KEYS * _FEWEST_KEYS // page_size, _FEWEST_KEYS // page_size, 1)
    return [(first, min(most, pages - first)) for first in range(0, pages, most)]
