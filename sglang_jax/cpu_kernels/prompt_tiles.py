"""Attention of prompts: products of six rows with blocks of keys or values in float32, and the layouts for them.

Rows and blocks are words of 4 bytes, of which a product takes one of each row and a vector of each block. A word is a
float32, or a pair of bfloat16 (`vdpbf16ps`): two adjacent values of a head for scores, those of two adjacent keys for
sums of values. So keys are stored as `[words of a head, KEYS]` and values as `[KEYS / packed, head_dim]`."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.cpu_kernels.vectors import (
    DOUBLE_WORDS,
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    add_products,
    in_all_lanes,
    lanes,
    load_vector,
    round_to_bfloat16,
    store_vector,
    supported,
)

ROWS = 6
"""Rows of a product: with the vectors of sums of `Products`, as many as fit into registers."""

LANES = 16
"""float32 values of the largest vector."""

_HALF = ir.VectorType(ir.IntType(16), LANES)


@dataclass(frozen=True, slots=True)
class Products:
    """How rows are multiplied by blocks: `packed` values to a word, 2 bfloat16 or 1 float32; `lanes` words to a vector;
    `vectors` of sums for each row, an even number. LLVM divides vectors that the processor lacks, and fuses products
    and sums of float32 if the processor can."""

    packed: int
    lanes: int
    vectors: int

    @classmethod
    def of(cls, width: int) -> Products:
        """Those for this processor, and for queries, keys and values of `width` bytes: 2 (bfloat16) or 4 (float32)."""
        if width == 2 and supported():
            return PAIRS
        return next((own for needed, own in _OF_FLOATS if supported(needed)), FOURS)


PAIRS = Products(packed=2, lanes=LANES, vectors=4)
"""Pairs of bfloat16, on a processor with `vectors.NEEDED`. The others widen bfloat16 to float32."""

SIXTEENS, EIGHTS, FOURS = (Products(1, 16, 4), Products(1, 8, 2), Products(1, 4, 2))
"""float32 in vectors of 512 bits with 32 registers; of 256 bits and of 128 bits with 16 registers."""

_OF_FLOATS = ((("avx512bw",), SIXTEENS), (("avx2",), EIGHTS))


@intrinsic(prefer_literal=True)
def multiply_rows(typing, packed, size, vectors, adds, words, rows, stride, columns, column_stride, sums, sum_stride):
    """Writes the products of `ROWS` rows and `size * vectors` columns to float32 sums, or adds them if `adds` is 1.

    Constants: `packed` and `size`, the lanes, of `Products`; `vectors` and `adds`. `words` of a row; addresses and
    strides in bytes: of rows; of columns `[words, columns]`; of sums `[ROWS, columns]`."""
    constants = (packed, size, vectors, adds)
    if not all(isinstance(each, types.IntegerLiteral) for each in constants):
        return None
    pairs, width, count, continues = (each.literal_value for each in constants)
    floats, integers = ir.VectorType(F32, width), ir.VectorType(I32, width)
    word, vector_of_words = (I32, integers) if pairs == 2 else (F32, floats)

    def multiply(builder, total, right, left):
        if pairs == 2:
            return add_products(builder, total, right, left)
        # Fused if the processor can, but never reordered: every row has the same sums.
        return builder.fadd(builder.fmul(left, right, flags=("contract",)), total, flags=("contract",))

    def generate(context, builder, signature, values):
        words, rows, stride, columns, column_stride, sums, sum_stride = values[len(constants) :]

        def place(row, vector):
            return builder.add(builder.add(sums, builder.mul(sum_stride, I64(row))), I64(4 * width * vector))

        def begin(row, vector):
            return load_vector(builder, floats, place(row, vector)) if continues else ir.Constant(floats, None)

        totals = [
            [cgutils.alloca_once_value(builder, begin(row, vector)) for vector in range(count)] for row in range(ROWS)
        ]
        with cgutils.for_range(builder, words, intp=I64) as loop:
            at = builder.add(columns, builder.mul(loop.index, column_stride))
            right = [
                load_vector(builder, vector_of_words, builder.add(at, I64(4 * width * vector)))
                for vector in range(count)
            ]
            own = builder.add(rows, builder.mul(loop.index, I64(4)))
            for row in range(ROWS):
                found = load_vector(builder, word, builder.add(own, builder.mul(stride, I64(row))))
                left = in_all_lanes(builder, found, width)
                for vector in range(count):
                    total = totals[row][vector]
                    builder.store(multiply(builder, builder.load(total), right[vector], left), total)
        for row in range(ROWS):
            for vector in range(count):
                store_vector(builder, builder.load(totals[row][vector]), place(row, vector))
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 7), generate


@intrinsic(prefer_literal=True)
def transpose_words(typing, size, source, stride, target, target_stride, words):
    """Transposes `size` rows of words, a constant power of two, `stride` bytes apart, to `words` columns, a multiple of
    `size`."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    width = size.literal_value
    kind = ir.VectorType(I32, width)

    def generate(context, builder, signature, values):
        _, source, stride, target, target_stride, words = values
        with cgutils.for_range_slice(builder, I64(0), words, I64(width), I64) as (first, _):
            own = builder.add(source, builder.mul(first, I64(4)))
            rows = [load_vector(builder, kind, builder.add(own, builder.mul(stride, I64(row)))) for row in range(width)]
            for number, column in enumerate(_transposed(builder, rows)):
                place = builder.mul(builder.add(first, I64(number)), target_stride)
                store_vector(builder, column, builder.add(target, place))
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 5), generate


def _transposed(builder, rows):
    """Transposes as many vectors as they have lanes by swapping blocks of half the lanes, a quarter, and so on to 1."""
    count = len(rows)
    step = count // 2
    while step:
        for first in (number for number in range(count) if not number & step):
            upper, lower = rows[first], rows[first + step]
            left = [lane if not lane & step else count + lane - step for lane in range(count)]
            right = [lane + step if not lane & step else count + lane for lane in range(count)]
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
def sum_weights(typing, packed, weights, target, vectors):
    """The sum of `32 * vectors` float32; with pairs in words, they are first rounded to bfloat16, and written to
    `target` as pairs. Constants: `packed` of `Products`, and `vectors`."""
    if not (isinstance(packed, types.IntegerLiteral) and isinstance(vectors, types.IntegerLiteral)):
        return None

    def generate(context, builder, signature, values):
        _, weights, target, _ = values
        total = ir.Constant(FLOATS, None)
        for vector in range(vectors.literal_value):
            at = builder.add(weights, I64(8 * LANES * vector))
            found = [load_vector(builder, FLOATS, builder.add(at, I64(4 * LANES * half))) for half in range(2)]
            if packed.literal_value == 2:
                words = builder.bitcast(round_to_bfloat16(builder, *found), DOUBLE_WORDS)
                store_vector(builder, words, builder.add(target, I64(4 * LANES * vector)))
                even = builder.shl(words, ir.Constant(DOUBLE_WORDS, [16] * LANES))
                odd = builder.and_(words, ir.Constant(DOUBLE_WORDS, [0xFFFF0000] * LANES))
                found = [builder.bitcast(half, FLOATS) for half in (even, odd)]
            for half in found:
                total = builder.fadd(total, half)
        step = LANES // 2
        while step:
            total = builder.fadd(total, lanes(builder, total, [lane ^ step for lane in range(LANES)]))
            step //= 2
        return builder.extract_element(total, I32(0))

    return types.float32(packed, types.int64, types.int64, vectors), generate


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
