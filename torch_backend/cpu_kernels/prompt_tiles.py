"""Attention of prompts: products of six rows with pairs of bfloat16 in float32 (`vdpbf16ps`), and the layouts for them.
A product takes two adjacent values of a row at once. So keys are stored as `[head_dim / 2, KEYS]` pairs of adjacent
values of a head, and values as `[KEYS / 2, head_dim]` pairs of adjacent keys."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.cpu_kernels.vectors import (
    DOUBLE_WORDS,
    FLOATS,
    I8,
    I32,
    I64,
    add_products,
    lanes,
    load_vector,
    round_to_bfloat16,
    store_vector,
)

ROWS = 6
"""Rows of a product: with four vectors of sums each, as many as fit into registers."""

LANES = 16
"""float32 values of a vector."""

_HALF = ir.VectorType(ir.IntType(16), LANES)


@intrinsic(prefer_literal=True)
def multiply_rows(typing, vectors, adds, pairs, rows, stride, columns, column_stride, sums, sum_stride):
    """Writes the products of `ROWS` rows of bfloat16 and `16 * vectors` columns to float32 sums, or adds them if `adds`
    is 1; `vectors` and `adds` are constants. `pairs` of values of a row; addresses and strides in bytes: of rows; of
    columns `[pairs, columns]`, a pair each; of sums `[ROWS, columns]`."""
    if not (isinstance(vectors, types.IntegerLiteral) and isinstance(adds, types.IntegerLiteral)):
        return None
    width = vectors.literal_value

    def generate(context, builder, signature, values):
        _, _, pairs, rows, stride, columns, column_stride, sums, sum_stride = values

        def place(row, vector):
            return builder.add(builder.add(sums, builder.mul(sum_stride, I64(row))), I64(4 * LANES * vector))

        def begin(row, vector):
            return load_vector(builder, FLOATS, place(row, vector)) if adds.literal_value else ir.Constant(FLOATS, None)

        totals = [
            [cgutils.alloca_once_value(builder, begin(row, vector)) for vector in range(width)] for row in range(ROWS)
        ]
        with cgutils.for_range(builder, pairs, intp=I64) as loop:
            at = builder.add(columns, builder.mul(loop.index, column_stride))
            right = [
                load_vector(builder, DOUBLE_WORDS, builder.add(at, I64(4 * LANES * vector))) for vector in range(width)
            ]
            own = builder.add(rows, builder.mul(loop.index, I64(4)))
            for row in range(ROWS):
                pair = load_vector(builder, I32, builder.add(own, builder.mul(stride, I64(row))))
                left = builder.insert_element(ir.Constant(DOUBLE_WORDS, ir.Undefined), pair, I32(0))
                left = lanes(builder, left, [0] * LANES)
                for vector in range(width):
                    total = totals[row][vector]
                    builder.store(add_products(builder, builder.load(total), right[vector], left), total)
        for row in range(ROWS):
            for vector in range(width):
                store_vector(builder, builder.load(totals[row][vector]), place(row, vector))
        return context.get_dummy_value()

    address = types.int64
    return types.void(vectors, adds, *[address] * 7), generate


@intrinsic
def pair_keys(typing, source, stride, target, target_stride, pairs):
    """Transposes sixteen keys of bfloat16, `stride` bytes apart, to columns of `pairs` pairs, a multiple of 16."""

    def generate(context, builder, signature, values):
        source, stride, target, target_stride, pairs = values
        with cgutils.for_range_slice(builder, I64(0), pairs, I64(LANES), I64) as (first, _):
            own = builder.add(source, builder.mul(first, I64(4)))
            rows = [
                load_vector(builder, DOUBLE_WORDS, builder.add(own, builder.mul(stride, I64(key))))
                for key in range(LANES)
            ]
            for number, column in enumerate(_transposed(builder, rows)):
                place = builder.mul(builder.add(first, I64(number)), target_stride)
                store_vector(builder, column, builder.add(target, place))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _transposed(builder, rows):
    """Transposes sixteen vectors of sixteen lanes by swapping blocks of 8, 4, 2, 1."""
    step = LANES // 2
    while step:
        for first in (number for number in range(LANES) if not number & step):
            upper, lower = rows[first], rows[first + step]
            left = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            right = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            rows[first] = lanes(builder, upper, left, lower)
            rows[first + step] = lanes(builder, upper, right, lower)
        step //= 2
    return rows


@intrinsic
def pair_values(typing, first, second, target, count):
    """Interleaves two rows of `count` bfloat16, a multiple of 16, to one row of pairs."""

    def generate(context, builder, signature, values):
        first, second, target, count = values
        with cgutils.for_range_slice(builder, I64(0), count, I64(LANES), I64) as (at, _):
            offset = builder.mul(at, I64(2))
            low, high = (
                builder.zext(load_vector(builder, _HALF, builder.add(row, offset)), DOUBLE_WORDS)
                for row in (first, second)
            )
            both = builder.or_(low, builder.shl(high, ir.Constant(DOUBLE_WORDS, [16] * LANES)))
            store_vector(builder, both, builder.add(target, builder.mul(at, I64(4))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def largest_of(typing, address, vectors):
    """The largest of `16 * vectors` float32, a constant; undefined with NaN. Numba's `max` compares one by one."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):
        found = load_vector(builder, FLOATS, values[0])
        for vector in range(1, vectors.literal_value):
            other = load_vector(builder, FLOATS, builder.add(values[0], I64(4 * LANES * vector)))
            found = _larger(builder, found, other)
        step = LANES // 2
        while step:
            found = _larger(builder, found, lanes(builder, found, [lane ^ step for lane in range(LANES)]))
            step //= 2
        return builder.extract_element(found, I32(0))

    return types.float32(types.int64, vectors), generate


@intrinsic(prefer_literal=True)
def round_weights(typing, source, target, vectors):
    """Rounds `32 * vectors` float32, a constant, to bfloat16 at `target`; returns the sum of the rounded values."""
    if not isinstance(vectors, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):
        source, target, _ = values
        total = ir.Constant(FLOATS, None)
        for vector in range(vectors.literal_value):
            at = builder.add(source, I64(8 * LANES * vector))
            pair = [load_vector(builder, FLOATS, builder.add(at, I64(4 * LANES * half))) for half in range(2)]
            words = builder.bitcast(round_to_bfloat16(builder, *pair), DOUBLE_WORDS)
            store_vector(builder, words, builder.add(target, I64(4 * LANES * vector)))
            even = builder.shl(words, ir.Constant(DOUBLE_WORDS, [16] * LANES))
            odd = builder.and_(words, ir.Constant(DOUBLE_WORDS, [0xFFFF0000] * LANES))
            for half in (even, odd):
                total = builder.fadd(total, builder.bitcast(half, FLOATS))
        step = LANES // 2
        while step:
            total = builder.fadd(total, lanes(builder, total, [lane ^ step for lane in range(LANES)]))
            step //= 2
        return builder.extract_element(total, I32(0))

    return types.float32(types.int64, types.int64, vectors), generate


def _larger(builder, first, second):
    return builder.select(builder.fcmp_ordered("<", first, second), second, first)


@intrinsic
def copy_bytes(typing, target, source, count):
    """Copies `count` bytes between areas that do not overlap."""

    def generate(context, builder, signature, values):
        target, source = (builder.inttoptr(address, I8.as_pointer()) for address in values[:2])
        cgutils.raw_memcpy(builder, target, source, values[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def clear_bytes(typing, target, count):
    """Sets `count` bytes to 0."""

    def generate(context, builder, signature, values):
        target = builder.inttoptr(values[0], I8.as_pointer())
        cgutils.memset(builder, target, values[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
