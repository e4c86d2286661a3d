"""Attention of prompts over paged keys and values in bfloat16 or float32: blocks of queries and keys as two products
with float32 sums and an online softmax (Milakov and Gimelshein 2018; Dao 2023), on the CPU's bfloat16 units if it has
these, and else in float32.

An item is some tokens of a sequence with all query heads of a kv head, for which keys and values are laid out once.
Blocks of keys start at multiples of `KEYS` in any chunk, blocks that no query of an item sees are skipped, and rows are
independent: a query has the same result, bit for bit, in any chunk and batch. For the units, weights are rounded to
bfloat16 before products and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import (
    BFLOAT16_BYTES,
    INT8_BYTES,
    elements,
    exponential,
    float_field,
    floats,
    hyperbolic_tangent,
    integers,
    load,
    store,
    take,
)
from sglang_jax.cpu_kernels.prompt_tiles import (
    LANES,
    PAIRS,
    ROWS,
    Products,
    clear_bytes,
    copy_bytes,
    largest_of,
    multiply_rows,
    pair_values,
    sum_weights,
    transpose_words,
)
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

FIELDS = "qqqqqqqqqqqqqqqqddqqqq"
"""Addresses of queries, key pages, value pages, output, page table, lengths, starts of sequences among the queries,
sinks (or 0), items and scratch; slots of scratch; columns of the page table, kv heads, page size, slots from a kv head
of a page to the next one (see `decode_attention`), window (or 0); scale, soft cap (or 0); for int8, the addresses that
`decode_attention` takes; and whether queries see all keys of their sequence, not only those up to their own. Items are
int32 `[items, 4]`: a sequence, a kv head, its first token in the sequence and the one past its last."""

KEYS = 64
"""Keys whose scores are in memory at once."""

MAX_ROWS = 192
"""Queries of an item: tokens times heads."""

_PAIR = PAIRS.packed

# The functions below are inlined into the kernel, so that sizes are constants there.
_part: Callable[[Any], Any] = njit(inline="always")


def supported_head_dim(head_dim: int) -> bool:
    """Whether a head, or a cached vector, fills vectors, of pairs too."""
    return head_dim % (2 * LANES) == 0


def tokens_of_item(group: int) -> int:
    """Maximum tokens of an item, for a kv head with `group` query heads."""
    return max(1, MAX_ROWS // group)


def heads_of_item(heads: int) -> tuple[int, ...]:
    """Heads over one latent vector that an item has, divisors of `heads`: those of three products, and, if that is
    another number, those of one, for steps with few items. Results are the same bits."""
    sizes = (next(size for size in range(most, 0, -1) if heads % size == 0) for most in (3 * ROWS, ROWS))
    return tuple(dict.fromkeys(sizes))


def _rows_of_item(group: int) -> int:
    return -(-tokens_of_item(group) * group // ROWS) * ROWS


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Offsets in a thread's scratch memory, where queries are at 0: of the sums of values; of keys and values as
    products take them, and as they were in pages; of scores; of weights; of the largest score and the sum of weights of
    each row, and what is added to all its scores; of the end. Only pairs need another place for values in pages, and
    for weights than for scores. Values that are part of keys are `staged_keys`, or for pairs made from them."""

    sums: int
    keys: int
    values: int
    staged_keys: int
    staged_values: int
    scores: int
    weights: int
    largest: int
    totals: int
    added: int
    end: int

    @classmethod
    def of(cls, products: Products, head_dim: int, group: int, value_dim: int | None) -> _Scratch:
        pairs = products.packed == _PAIR
        rows, words = _rows_of_item(group), head_dim // products.packed
        sums = 4 * rows * words
        keys = sums + 4 * rows * (value_dim or head_dim)
        values = keys + 4 * KEYS * words
        staged = values + 4 * KEYS * words
        scores = staged + 4 * KEYS * words
        weights = scores + 4 * ROWS * KEYS if pairs else scores
        largest = weights + 4 * ROWS * KEYS // products.packed
        totals = largest + 4 * rows
        staged_values = staged if pairs else values
        if value_dim is not None and not pairs:
            values = staged
        added = totals + 4 * rows
        return cls(sums, keys, values, staged, staged_values, scores, weights, largest, totals, added, added + 4 * rows)


def scratch_bytes(products: Products, head_dim: int, group: int, value_dim: int | None = None) -> int:
    """Scratch bytes of each thread."""
    return _Scratch.of(products, head_dim, group, value_dim).end


def build_prompt_attention(
    compiler: KernelCompiler,
    products: Products,
    width: int,
    head_dim: int,
    group: int,
    query_width: int | None = None,
    value_dim: int | None = None,
) -> CompiledKernel:
    """Builds the kernel for keys and values of `width` bytes, 1 (int8), 2 (bfloat16) or 4 (float32), heads of
    `head_dim`, a multiple of 32, and `group` query heads to a kv head. `query_width`: bytes of queries and output, if
    others. For pairs, queries in float32 are rounded, and int8 keys and values once they are scaled.

    `value_dim`: for latent vectors, which are not int8. A page then has one key of each token for all heads, whose
    first `value_dim` numbers, a multiple of 32, are its value; the output is `[T, heads, value_dim]`. `kv_heads` of the
    fields is the number of parts into which heads are divided, of `group` each."""
    query_width, shared = query_width or width, value_dim is not None
    value_dim = value_dim or head_dim
    query_bytes, output_bytes = query_width * head_dim, query_width * value_dim
    packed, lanes, vectors = products.packed, products.lanes, products.vectors
    head_bytes, word_bytes, weight_bytes = width * head_dim, 4 * head_dim // packed, 4 * KEYS // packed
    places = _Scratch.of(products, head_dim, group, value_dim if shared else None)
    # Values that are part of keys are as far apart as these, except in pairs.
    value_stride = 4 * head_dim if shared and packed != _PAIR else 4 * value_dim
    sums_at, keys_at, values_at, scores_at = places.sums, places.keys, places.values, places.scores
    staged_keys_at, staged_values_at, weights_at = places.staged_keys, places.staged_values, places.weights
    largest_at, totals_at, own_bytes = places.largest, places.totals, places.end
    added_at, integer = places.added, width == INT8_BYTES

    def kernel(work):
        kv_heads, page_size = work[FIRST_FIELD + 12], work[FIRST_FIELD + 13]
        head_slots, window = work[FIRST_FIELD + 14], work[FIRST_FIELD + 15]
        scale, soft_cap = float_field(work, FIRST_FIELD + 16), float_field(work, FIRST_FIELD + 17)
        sees_all = work[FIRST_FIELD + 21] != 0
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
            seen = load(integers(work[FIRST_FIELD + 5]), sequence) if sees_all else first + tokens
            begin = max(0, first - window + 1) if window > 0 else 0
            pages = integers(work[FIRST_FIELD + 4] + sequence * work[FIRST_FIELD + 11] * 4)
            page_bytes, in_page = head_slots * head_bytes, 0
            if not shared:
                page_bytes, in_page = kv_heads * page_bytes, kv_head * page_bytes
            rows = tokens * group
            strips = (rows + ROWS - 1) // ROWS

            clear_bytes(own, strips * ROWS * word_bytes)
            clear_bytes(own + sums_at, strips * ROWS * value_dim * 4)
            for i in range(tokens):
                place = ((start + token + i) * kv_heads + kv_head) * group * query_bytes
                _copy(own + i * group * word_bytes, work[FIRST_FIELD] + place, group * head_dim, query_width, packed)
                if integer:
                    of_token, mean = floats(own + added_at + 4 * i * group), work[FIRST_FIELD + 20]
                    queries = elements(work[FIRST_FIELD] + place, query_width)
                    _multiply_mean(of_token, queries, floats(mean + 4 * kv_head * head_dim), group, head_dim, scale)
            _start_softmax(largest, totals, rows, work[FIRST_FIELD + 7], kv_head, group)

            block = begin // KEYS * KEYS
            while block < seen:
                low, high = max(begin - block, 0), min(KEYS, seen - block)
                staged, source = own + staged_keys_at, work[FIRST_FIELD + 1] + in_page
                if integer:
                    scales = work[FIRST_FIELD + 18] + 4 * kv_head * head_slots
                    _widen(staged, source, scales, pages, block, low, high, page_bytes, page_size, head_dim, packed)
                else:
                    _stage(staged, source, pages, block, low, high, page_bytes, page_size, head_dim, width, packed)
                for key in range(0, KEYS, lanes):
                    column = own + keys_at + 4 * key
                    transpose_words(lanes, staged + key * word_bytes, word_bytes, column, 4 * KEYS, head_dim // packed)
                if not shared:
                    staged, source = own + staged_values_at, work[FIRST_FIELD + 2] + in_page
                if shared:
                    pass
                elif integer:
                    scales = work[FIRST_FIELD + 19] + 4 * kv_head * head_slots
                    _widen(staged, source, scales, pages, block, low, high, page_bytes, page_size, head_dim, packed)
                else:
                    _stage(staged, source, pages, block, low, high, page_bytes, page_size, head_dim, width, packed)
                if packed == _PAIR:
                    for key in range(0, KEYS, 2):
                        at = staged + key * word_bytes
                        pair_values(at, at + word_bytes, own + values_at + 2 * key * value_dim, value_dim)
                # Strips whose last query is before the block see none of its keys; nor do those whose windows start
                # after it.
                for strip in range(0 if sees_all else max(block - first, 0) * group // ROWS, strips):
                    row = strip * ROWS
                    if window > 0 and block + KEYS <= first + row // group - window + 1:
                        continue
                    queries, weights = own + row * word_bytes, own + weights_at
                    keys, scores = own + keys_at, own + scores_at
                    _multiply(0, queries, head_dim, keys, 4 * KEYS, KEYS, scores, packed, lanes, vectors)
                    for each in range(row, row + ROWS):
                        seen_to = min((seen if sees_all else first + each // group + 1) - block, KEYS)
                        seen_from = max(first + each // group - window + 1 - block, 0) if window > 0 else 0
                        of_row = weights + (each - row) * weight_bytes
                        if each < rows and seen_from < seen_to:
                            scores = own + scores_at + 4 * KEYS * (each - row)
                            plus = load(floats(own + added_at), each) if integer else np.float32(0)
                            before = load(largest, each)
                            top, fading = _weigh(scores, seen_from, seen_to, scale, plus, soft_cap, before)
                            store(largest, each, top)
                            total = load(totals, each) * fading + sum_weights(packed, scores, of_row, 2)
                            store(totals, each, total)
                            if fading != 1:
                                sums = floats(own + sums_at + 4 * value_dim * each)
                                for k in range(value_dim):
                                    store(sums, k, load(sums, k) * fading)
                        else:
                            clear_bytes(of_row, weight_bytes)
                    values, of_strip = own + values_at, own + sums_at + 4 * value_dim * row
                    _multiply(1, weights, KEYS, values, value_stride, value_dim, of_strip, packed, lanes, vectors)
                block += KEYS

            for i in range(tokens):
                place = ((start + token + i) * kv_heads + kv_head) * group * output_bytes
                for head in range(group):
                    row = i * group + head
                    output = elements(work[FIRST_FIELD + 3] + place + head * output_bytes, query_width)
                    sums = floats(own + sums_at + row * value_dim * 4)
                    whole = np.float32(1) / load(totals, row)
                    for k in range(value_dim):
                        store(output, k, load(sums, k) * whole)

    return compiler(kernel)


@_part
def _copy(target, source, count, width, packed):
    """Copies values to words: bfloat16 to pairs as they are, others rounded to pairs or as float32."""
    given = elements(source, width)
    if packed == _PAIR and width == BFLOAT16_BYTES:
        copy_bytes(target, source, count * width)
    elif packed == _PAIR:
        rounded = elements(target, BFLOAT16_BYTES)
        for i in range(count):
            store(rounded, i, load(given, i))
    else:
        found = floats(target)
        for i in range(count):
            store(found, i, load(given, i))


@_part
def _start_softmax(largest, totals, rows, sinks, kv_head, group):
    """Initialises the softmax; a sink is a key without a value."""
    for row in range(rows):
        if sinks != 0:
            store(largest, row, load(floats(sinks), kv_head * group + row % group))
            store(totals, row, np.float32(1))
        else:
            store(largest, row, np.float32(-np.inf))
            store(totals, row, np.float32(0))


@_part
def _stage(target, source, pages, block, low, high, page_bytes, page_size, head_dim, width, packed):
    """Copies keys `low` to `high` of a block from pages to words; others become 0: no query sees them, and they may
    belong to other rows. `source`: the first key of the head in page 0."""
    word_bytes = 4 * head_dim // packed
    clear_bytes(target, low * word_bytes)
    clear_bytes(target + high * word_bytes, (KEYS - high) * word_bytes)
    key = low
    while key < high:
        offset = (block + key) % page_size
        run = min(page_size - offset, high - key)
        place = source + load(pages, (block + key) // page_size) * page_bytes + offset * head_dim * width
        _copy(target + key * word_bytes, place, run * head_dim, width, packed)
        key += run


@_part
def _multiply_mean(added, queries, mean, group, head_dim, scale):
    """What the mean of keys adds to the scores of a token's queries."""
    for query in range(group):
        total = np.float32(0)
        for i in range(head_dim):
            total += load(queries, query * head_dim + i) * load(mean, i)
        store(added, query, total * scale)


@_part
def _widen(target, source, scales, pages, block, low, high, page_bytes, page_size, head_dim, packed):
    """`_stage` for int8: times the scale of a key or value."""
    word_bytes = 4 * head_dim // packed
    clear_bytes(target, low * word_bytes)
    clear_bytes(target + high * word_bytes, (KEYS - high) * word_bytes)
    for key in range(low, high):
        slot = load(pages, (block + key) // page_size) * (page_bytes // head_dim) + (block + key) % page_size
        given, scale = elements(source + slot * head_dim, INT8_BYTES), load(floats(scales), slot)
        if packed == _PAIR:
            pairs = elements(target + key * word_bytes, BFLOAT16_BYTES)
            for i in range(head_dim):
                store(pairs, i, load(given, i) * scale)
        else:
            words = floats(target + key * word_bytes)
            for i in range(head_dim):
                store(words, i, load(given, i) * scale)


@_part
def _multiply(adds, rows, values, columns, stride, count, sums, packed, lanes, vectors):
    """Products of the `values` of each row of a strip and `count` columns, whose words are `stride` bytes apart: see
    `multiply_rows`."""
    words = values // packed
    column = 0
    while column + vectors * lanes <= count:
        at, to = columns + 4 * column, sums + 4 * column
        multiply_rows(packed, lanes, vectors, adds, words, rows, 4 * words, at, stride, to, 4 * count)
        column += vectors * lanes
    while column < count:
        at, to = columns + 4 * column, sums + 4 * column
        multiply_rows(packed, lanes, 2, adds, words, rows, 4 * words, at, stride, to, 4 * count)
        column += 2 * lanes


@_part
def _weigh(address, seen_from, seen_to, scale, added, soft_cap, before):
    """Turns a row's scores of a block, times `scale` and plus what is `added`, into weights. Returns the largest score
    so far, which was `before`, and by what this multiplies earlier weights."""
    scores = floats(address)
    masked = seen_from > 0 or seen_to < KEYS
    for i in range(KEYS):
        store(scores, i, load(scores, i) * scale + added)
    if soft_cap > 0:
        for i in range(KEYS):
            store(scores, i, soft_cap * hyperbolic_tangent(load(scores, i) / soft_cap))
    if masked:
        for i in range(KEYS):
            if i < seen_from or i >= seen_to:
                store(scores, i, np.float32(-np.inf))
    top = max(before, largest_of(address, 4))
    for i in range(KEYS):
        store(scores, i, exponential(load(scores, i) - top))
    if masked:
        for i in range(KEYS):
            if i < seen_from or i >= seen_to:
                store(scores, i, np.float32(0))
    return top, exponential(before - top) if top != before else np.float32(1)
