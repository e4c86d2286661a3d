"""Attention of prompts over paged keys and values in bfloat16: blocks of queries and keys as two products with float32
sums and an online softmax (Milakov and Gimelshein 2018; Dao 2023), on the CPU's bfloat16 units.

An item is some tokens of a sequence with all query heads of a kv head, for which keys and values are laid out once.
Blocks of keys start at multiples of `KEYS` in any chunk, blocks that no query of an item sees are skipped, and rows are
independent: a query has the same result, bit for bit, in any chunk and batch. Weights are rounded to bfloat16 before
products and sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import elements, exponential, float_field, floats, integers, load, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER
from torch_backend.cpu_kernels.prompt_tiles import (
    LANES,
    ROWS,
    clear_bytes,
    copy_bytes,
    largest_of,
    multiply_rows,
    pair_keys,
    pair_values,
    round_weights,
)

FIELDS = "qqqqqqqqqqqqqqqdd"
"""Addresses of queries, key pages, value pages, output, page table, lengths, starts of sequences among the queries,
sinks (or 0), items and scratch; slots of scratch; columns of the page table, kv heads, page size, window (or 0); scale,
soft cap (or 0). Items are int32 `[items, 4]`: a sequence, a kv head, its first token in the sequence and the one past
its last."""

KEYS = 64
"""Keys whose scores are in memory at once."""

MAX_ROWS = 192
"""Queries of an item: tokens times heads."""

# The functions below are inlined into the kernel, so that sizes are constants there.
_part: Callable[[Any], Any] = njit(inline="always")


def supported_head_dim(head_dim: int) -> bool:
    """Whether pairs of a head fill vectors."""
    return head_dim % (2 * LANES) == 0


def tokens_of_item(group: int) -> int:
    """Maximum tokens of an item, for a kv head with `group` query heads."""
    return max(1, MAX_ROWS // group)


def _rows_of_item(group: int) -> int:
    return -(-tokens_of_item(group) * group // ROWS) * ROWS


def scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch bytes of each thread: queries; sums of values; paired keys; paired values; keys in their original order;
    scores; weights; the largest score and the sum of weights of each row."""
    rows = _rows_of_item(group)
    keys = 2 * KEYS * head_dim
    return rows * head_dim * 6 + 3 * keys + ROWS * KEYS * 6 + rows * 8


def build_prompt_attention(compiler: KernelCompiler, head_dim: int, group: int) -> CompiledKernel:
    """Builds the kernel for bfloat16, heads of `head_dim`, a multiple of 32, and `group` query heads to a kv head."""
    head_bytes, pairs = 2 * head_dim, head_dim // 2
    most_rows, key_bytes = _rows_of_item(group), 2 * KEYS * head_dim
    own_bytes = scratch_bytes(head_dim, group)
    sums_at = most_rows * head_bytes
    keys_at = sums_at + most_rows * head_dim * 4
    values_at, staged_at, scores_at = keys_at + key_bytes, keys_at + 2 * key_bytes, keys_at + 3 * key_bytes
    weights_at = scores_at + ROWS * KEYS * 4
    largest_at = weights_at + ROWS * KEYS * 2
    totals_at = largest_at + most_rows * 4

    def kernel(work):
        kv_heads, page_size, window = work[FIRST_FIELD + 12], work[FIRST_FIELD + 13], work[FIRST_FIELD + 14]
        scale, soft_cap = float_field(work, FIRST_FIELD + 15), float_field(work, FIRST_FIELD + 16)
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 10]:
            return
        own = work[FIRST_FIELD + 9] + slot * own_bytes
        largest, totals = floats(own + largest_at), floats(own + totals_at)
        items = integers(work[FIRST_FIELD + 8])
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            sequence, kv_head = load(items, 4 * item), load(items, 4 * item + 1)
            token, tokens = load(items, 4 * item + 2), load(items, 4 * item + 3) - load(items, 4 * item + 2)
            start = load(integers(work[FIRST_FIELD + 6]), sequence)
            count = load(integers(work[FIRST_FIELD + 6]), sequence + 1) - start
            first = load(integers(work[FIRST_FIELD + 5]), sequence) - count + token  # position of the first query
            last = first + tokens
            begin = max(0, first - window + 1) if window > 0 else 0
            pages = integers(work[FIRST_FIELD + 4] + sequence * work[FIRST_FIELD + 11] * 4)
            rows = tokens * group
            strips = (rows + ROWS - 1) // ROWS

            clear_bytes(own, strips * ROWS * head_bytes)
            clear_bytes(own + sums_at, strips * ROWS * head_dim * 4)
            for i in range(tokens):
                place = ((start + token + i) * kv_heads + kv_head) * group * head_bytes
                copy_bytes(own + i * group * head_bytes, work[FIRST_FIELD] + place, group * head_bytes)
            for row in range(rows):
                if work[FIRST_FIELD + 7] != 0:
                    sink = load(floats(work[FIRST_FIELD + 7]), kv_head * group + row % group)
                    store(largest, row, sink)
                    store(totals, row, np.float32(1))
                else:
                    store(largest, row, np.float32(-np.inf))
                    store(totals, row, np.float32(0))

            block = begin // KEYS * KEYS
            while block < last:
                low, high = max(begin - block, 0), min(KEYS, last - block)
                staged, lines = own + staged_at, kv_heads * page_size
                own_lines = kv_head * page_size  # the offset of the head's keys in a page
                _stage(staged, work[FIRST_FIELD + 1], pages, block, low, high, lines, own_lines, page_size, head_bytes)
                for key in range(0, KEYS, LANES):
                    pair_keys(staged + key * head_bytes, head_bytes, own + keys_at + key * 4, 4 * KEYS, pairs)
                _stage(staged, work[FIRST_FIELD + 2], pages, block, low, high, lines, own_lines, page_size, head_bytes)
                for key in range(0, KEYS, 2):
                    source = staged + key * head_bytes
                    pair_values(source, source + head_bytes, own + values_at + key * head_bytes, head_dim)
                # Strips whose last query is before the block see none of its keys; nor do those whose windows start
                # after it.
                for strip in range(max(block - first, 0) * group // ROWS, strips):
                    row = strip * ROWS
                    if window > 0 and block + KEYS <= first + row // group - window + 1:
                        continue
                    queries = own + row * head_bytes
                    multiply_rows(4, 0, pairs, queries, head_bytes, own + keys_at, 4 * KEYS, own + scores_at, 4 * KEYS)
                    for each in range(ROWS):
                        seen_to = min(first + (row + each) // group + 1 - block, KEYS)
                        seen_from = max(first + (row + each) // group - window + 1 - block, 0) if window > 0 else 0
                        weights = own + weights_at + each * KEYS * 2
                        if row + each < rows and seen_from < seen_to:
                            sums = floats(own + sums_at + (row + each) * head_dim * 4)
                            _weigh(
                                own + scores_at + each * KEYS * 4,
                                weights,
                                seen_from,
                                seen_to,
                                scale,
                                soft_cap,
                                largest,
                                totals,
                                row + each,
                                sums,
                                head_dim,
                            )
                        else:
                            clear_bytes(weights, KEYS * 2)
                    _add(own + weights_at, own + values_at, own + sums_at + row * head_dim * 4, head_dim)
                block += KEYS

            for i in range(tokens):
                place = ((start + token + i) * kv_heads + kv_head) * group * head_bytes
                for head in range(group):
                    row = i * group + head
                    output = elements(work[FIRST_FIELD + 3] + place + head * head_bytes, 2)
                    sums = floats(own + sums_at + row * head_dim * 4)
                    whole = np.float32(1) / load(totals, row)
                    for k in range(head_dim):
                        store(output, k, load(sums, k) * whole)

    return compiler(kernel)


@_part
def _stage(target, source, pages, block, low, high, lines, own_lines, page_size, head_bytes):
    """Copies keys `low` to `high` of a block from pages of `lines` keys; others become 0: no query sees them, and they
    may belong to other rows."""
    clear_bytes(target, low * head_bytes)
    clear_bytes(target + high * head_bytes, (KEYS - high) * head_bytes)
    key = low
    while key < high:
        offset = (block + key) % page_size
        run = min(page_size - offset, high - key)
        place = load(pages, (block + key) // page_size) * lines + own_lines + offset
        copy_bytes(target + key * head_bytes, source + place * head_bytes, run * head_bytes)
        key += run


@_part
def _weigh(address, weights, seen_from, seen_to, scale, soft_cap, largest, totals, row, sums, head_dim):
    """Turns a row's scores of a block into weights, and rescales earlier sums to the same largest score."""
    scores = floats(address)
    masked = seen_from > 0 or seen_to < KEYS
    for i in range(KEYS):
        store(scores, i, load(scores, i) * scale)
    if soft_cap > 0:
        for i in range(KEYS):
            store(scores, i, soft_cap * np.float32(math.tanh(load(scores, i) / soft_cap)))
    if masked:
        for i in range(KEYS):
            if i < seen_from or i >= seen_to:
                store(scores, i, np.float32(-np.inf))
    before = load(largest, row)
    top = max(before, largest_of(address, 4))
    for i in range(KEYS):
        store(scores, i, exponential(load(scores, i) - top))
    if masked:
        for i in range(KEYS):
            if i < seen_from or i >= seen_to:
                store(scores, i, np.float32(0))
    total = round_weights(address, weights, 2)
    if top != before:
        fading = exponential(before - top)
        store(largest, row, top)
        total += load(totals, row) * fading
        for k in range(head_dim):
            store(sums, k, load(sums, k) * fading)
    else:
        total += load(totals, row)
    store(totals, row, total)


@_part
def _add(weights, values, sums, head_dim):
    """Adds the products of a strip's weights with a block's values to its sums."""
    column = 0
    while column + 4 * LANES <= head_dim:
        at = column * 4
        multiply_rows(4, 1, KEYS // 2, weights, KEYS * 2, values + at, 4 * head_dim, sums + at, 4 * head_dim)
        column += 4 * LANES
    while column < head_dim:
        at = column * 4
        multiply_rows(2, 1, KEYS // 2, weights, KEYS * 2, values + at, 4 * head_dim, sums + at, 4 * head_dim)
        column += 2 * LANES
