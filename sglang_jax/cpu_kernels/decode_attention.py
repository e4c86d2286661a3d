"""Attention of single queries over paged keys and values, with all query heads of a kv head at once. Keys are processed
in blocks with an online softmax (Milakov and Gimelshein 2018), so that a thread's scratch memory does not grow with the
length. A row's result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import (
    INT8_BYTES,
    elements,
    exponential,
    float_field,
    floats,
    hyperbolic_tangent,
    integers,
    load,
    prefetch,
    store,
    take,
)
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER

FIELDS = "qqqqqqqqqqqqqqddqqq"
"""Addresses of queries, key pages, value pages, output, page table, lengths, sinks (or 0) and scratch; slots of
scratch; columns of the page table, kv heads, page size, slots from a kv head of a page to the next one (the page size,
or twice that where the values of a head follow its keys), window (or 0); scale, soft cap (or 0); addresses of scales of
int8 keys and of int8 values, float32 `[pages, kv_heads, page_size]`, and of what is added to a scaled key, float32
`[kv_heads, head_dim]`. An item is a kv head of a row."""

_BLOCK = 256
"""Keys whose scores are in memory at once."""

_AHEAD = 16
"""Keys or values by which reading is at least ahead of computing: the processor's own prefetch ends with a page."""

# The functions below are inlined into the kernel, so that sizes are constants there.
_part: Callable[[Any], Any] = njit(inline="always")


def scratch_floats(head_dim: int, group: int) -> int:
    """float32 words of scratch of each thread. For each query of a group: scores of a block; the sum of values so far;
    the query times the scale; the largest score and the sum of weights so far; what is added to all its scores."""
    return group * (_BLOCK + 2 * head_dim + 3)


def build_decode_attention(
    compiler: KernelCompiler, width: int, head_dim: int, group: int, query_width: int | None = None
) -> CompiledKernel:
    """Builds the kernel for keys and values of `width` bytes, 1 for int8, heads of `head_dim` and `group` query heads
    to a kv head. `query_width`: bytes of queries and output, if others."""
    head_bytes, query_width = head_dim * width, query_width or width
    group_bytes = group * head_dim * query_width
    sums_at, queries_at = _BLOCK * group, (_BLOCK + head_dim) * group
    largest_at, weights_at = (_BLOCK + 2 * head_dim) * group, (_BLOCK + 2 * head_dim + 1) * group
    added_at = (_BLOCK + 2 * head_dim + 2) * group
    scratch_bytes = 4 * scratch_floats(head_dim, group)
    integer = width == INT8_BYTES

    def kernel(work):
        lens, columns = integers(work[FIRST_FIELD + 5]), work[FIRST_FIELD + 9]
        kv_heads, page_size = work[FIRST_FIELD + 10], work[FIRST_FIELD + 11]
        head_slots, window = work[FIRST_FIELD + 12], work[FIRST_FIELD + 13]
        scale, soft_cap = float_field(work, FIRST_FIELD + 14), float_field(work, FIRST_FIELD + 15)
        slot = take(work, SLOT_COUNTER)
        if slot >= work[FIRST_FIELD + 8]:
            return
        scratch = work[FIRST_FIELD + 7] + slot * scratch_bytes
        scores, sums, queries = floats(scratch), floats(scratch + 4 * sums_at), floats(scratch + 4 * queries_at)
        largest, weights = floats(scratch + 4 * largest_at), floats(scratch + 4 * weights_at)
        added = floats(scratch + 4 * added_at)
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            row, kv_head = item // kv_heads, item % kv_heads
            pages = integers(work[FIRST_FIELD + 4] + row * columns * 4)
            length = load(lens, row)
            source = elements(work[FIRST_FIELD] + item * group_bytes, query_width)
            for i in range(group * head_dim):
                store(queries, i, load(source, i) * scale)
                store(sums, i, np.float32(0))
            _start_softmax(largest, weights, work[FIRST_FIELD + 6], kv_head, group)
            if integer:
                _multiply_mean(added, queries, work[FIRST_FIELD + 18] + 4 * kv_head * head_dim, group, head_dim)
            first = max(length - window, 0) if window > 0 else 0
            while first < length:
                count = min(_BLOCK, length - first)
                done = 0
                while done < count:
                    run = min(page_size - (first + done) % page_size, count - done)
                    place = _find(pages, first + done, kv_heads, kv_head, page_size, head_slots)
                    keys = elements(work[FIRST_FIELD + 1] + place * head_bytes, width)
                    later = min(first + done + max(run, _AHEAD), length - 1)
                    ahead = _find(pages, later, kv_heads, kv_head, page_size, head_slots)
                    coming = work[FIRST_FIELD + 1] + ahead * head_bytes
                    _score(scores, done, queries, keys, run, coming, group, head_dim, head_bytes)
                    if integer:
                        _scale(scores, done, run, work[FIRST_FIELD + 16] + 4 * place, group)
                        _add_means(scores, done, run, added, group)
                    done += run
                for query in range(group):
                    _weigh(scores, query, count, soft_cap, largest, weights, sums, head_dim)
                done = 0
                while done < count:
                    run = min(page_size - (first + done) % page_size, count - done)
                    place = _find(pages, first + done, kv_heads, kv_head, page_size, head_slots)
                    values = elements(work[FIRST_FIELD + 2] + place * head_bytes, width)
                    later = min(first + done + max(run, _AHEAD), length - 1)
                    ahead = _find(pages, later, kv_heads, kv_head, page_size, head_slots)
                    coming = work[FIRST_FIELD + 2] + ahead * head_bytes
                    if integer:
                        _scale(scores, done, run, work[FIRST_FIELD + 17] + 4 * place, group)
                    _add(sums, scores, done, values, run, coming, group, head_dim, head_bytes)
                    done += run
                first += count
            output = elements(work[FIRST_FIELD + 3] + item * group_bytes, query_width)
            for query in range(group):
                whole = np.float32(1) / load(weights, query) if length > 0 else np.float32(0)
                for i in range(query * head_dim, (query + 1) * head_dim):
                    store(output, i, load(sums, i) * whole)

    return compiler(kernel)


@_part
def _start_softmax(largest, weights, sinks, kv_head, group):
    """Initialises the softmax; a sink is a key without a value."""
    for query in range(group):
        if sinks != 0:
            store(largest, query, load(floats(sinks), kv_head * group + query))
            store(weights, query, np.float32(1))
        else:
            store(largest, query, np.float32(-np.inf))
            store(weights, query, np.float32(0))


@_part
def _multiply_mean(added, queries, mean, group, head_dim):
    """Products of the queries and what is added to each key."""
    for query in range(group):
        total = np.float32(0)
        for i in range(head_dim):
            total += load(queries, query * head_dim + i) * load(floats(mean), i)
        store(added, query, total)


@_part
def _scale(scores, done, run, scales, group):
    """Multiplies scores, or weights, of a run by the scales of its keys, or values."""
    for query in range(group):
        at = query * _BLOCK + done
        for key in range(run):
            store(scores, at + key, load(scores, at + key) * load(floats(scales), key))


@_part
def _add_means(scores, done, run, added, group):
    for query in range(group):
        at = query * _BLOCK + done
        for key in range(run):
            store(scores, at + key, load(scores, at + key) + load(added, query))


@_part
def _find(pages, key, kv_heads, kv_head, page_size, head_slots):
    """A key's offset in the pages, in slots."""
    return (load(pages, key // page_size) * kv_heads + kv_head) * head_slots + key % page_size


@_part
def _score(scores, done, queries, keys, run, coming, group, head_dim, head_bytes):
    """Products of all queries and the keys of a run, which starts at key `done` of the block. `coming`: the address of
    keys that are needed later."""
    for key in range(run):
        prefetch(coming + key * head_bytes, head_bytes)
        for query in range(group):
            score = np.float32(0)
            for i in range(head_dim):
                score += load(queries, query * head_dim + i) * load(keys, key * head_dim + i)
            store(scores, query * _BLOCK + done + key, score)


@_part
def _weigh(scores, query, count, soft_cap, largest, weights, sums, head_dim):
    """Turns a query's scores of a block into weights, and rescales earlier sums to the same largest score."""
    start = query * _BLOCK
    if soft_cap > 0:
        for i in range(start, start + count):
            store(scores, i, soft_cap * hyperbolic_tangent(load(scores, i) / soft_cap))
    before = load(largest, query)
    top = before
    for i in range(start, start + count):
        top = max(top, load(scores, i))
    total = np.float32(0)
    for i in range(start, start + count):
        weight = exponential(load(scores, i) - top)
        store(scores, i, weight)
        total += weight
    fading = exponential(before - top)
    store(largest, query, top)
    store(weights, query, load(weights, query) * fading + total)
    for i in range(query * head_dim, (query + 1) * head_dim):
        store(sums, i, load(sums, i) * fading)


@_part
def _add(sums, scores, done, values, run, coming, group, head_dim, head_bytes):
    """Adds the values of a run times their weights; four at once, so that sums are read and written less often."""
    key = 0
    while key + 4 <= run:
        for ahead in range(key, key + 4):
            prefetch(coming + ahead * head_bytes, head_bytes)
        for query in range(group):
            at = query * _BLOCK + done + key
            first, second = load(scores, at), load(scores, at + 1)
            third, fourth = load(scores, at + 2), load(scores, at + 3)
            for i in range(head_dim):
                value = key * head_dim + i
                near = first * load(values, value) + second * load(values, value + head_dim)
                far = third * load(values, value + 2 * head_dim) + fourth * load(values, value + 3 * head_dim)
                store(sums, query * head_dim + i, load(sums, query * head_dim + i) + (near + far))
        key += 4
    while key < run:
        for query in range(group):
            weight = load(scores, query * _BLOCK + done + key)
            for i in range(head_dim):
                value = weight * load(values, key * head_dim + i)
                store(sums, query * head_dim + i, load(sums, query * head_dim + i) + value)
        key += 1
