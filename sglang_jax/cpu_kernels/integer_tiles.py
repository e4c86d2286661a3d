"""Products of rows of int8 with a tile of a matrix of quantised values in blocks: sixteen outputs at a time.

A row is rounded to int8 in blocks of 32, as llama.cpp does: `value = scale * integer`, with the block's largest
absolute value at 127. A weight is `scale * level + least`, so a block's product is `scale_w * scale_x * sum(level *
integer) + least * scale_x * sum(integer)`. The sum of levels times integers is exact: an instruction multiplies and
adds four bytes for each of sixteen outputs (`vpdpbusd`). Blocks are added in float32, in order, so a row has the same
result, bit for bit, in any batch.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.checkpoint.encoding import BLOCK
from sglang_jax.cpu_kernels.block_layout import INTEGER_OUTPUTS, OF_BLOCK
from sglang_jax.cpu_kernels.vectors import (
    DOUBLE_WORDS,
    F16,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    lanes,
    llvm_function,
    load_vector,
    splat,
    store_vector,
)

LARGEST = 127.0

_AHEAD = 4096
"""Bytes of quantised values that are prefetched."""

_ZERO_OF_8_BITS = 128
"""8-bit values are stored with this added, because one side of the product is unsigned."""


@intrinsic
def round_row(typing, x, blocks, integers, scales):
    """Rounds a row of bfloat16 to int8 `integers [blocks, 32]`, and writes `scales [blocks, 3]`: float32, the scale and
    the scale times the sum of the integers, both NaN for a block with NaN or infinity; int32, -128 times that sum."""

    def generate(context, builder, signature, values):
        x, blocks, integers, scales = values
        halves = ir.VectorType(I16, 16)
        absolute = llvm_function(builder, "llvm.fabs.v16f32", FLOATS, [FLOATS])
        larger = llvm_function(builder, "llvm.maxnum.v16f32", FLOATS, [FLOATS] * 2)
        largest_of = llvm_function(builder, "llvm.vector.reduce.fmax.v16f32", F32, [FLOATS])
        sum_of = llvm_function(builder, "llvm.vector.reduce.add.v16i32", I32, [DOUBLE_WORDS])
        sum_of_floats = llvm_function(builder, "llvm.vector.reduce.fadd.v16f32", F32, [F32, FLOATS])
        nearest = llvm_function(builder, "llvm.rint.v16f32", FLOATS, [FLOATS])
        zero = ir.Constant(FLOATS, None)
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            at = builder.add(x, builder.mul(loop.index, I64(2 * BLOCK)))
            parts = []
            for offset in (0, BLOCK):
                words = builder.zext(load_vector(builder, halves, builder.add(at, I64(offset))), DOUBLE_WORDS)
                parts.append(builder.bitcast(builder.shl(words, ir.Constant(DOUBLE_WORDS, [16] * 16)), FLOATS))
            largest = builder.call(largest_of, [builder.call(larger, [builder.call(absolute, [p]) for p in parts])])
            # 0 for numbers, and NaN otherwise.
            nothing = builder.fadd(*(builder.fmul(part, zero) for part in parts))
            broken = builder.call(sum_of_floats, [F32(0.0), nothing])
            scale = builder.fadd(builder.fdiv(largest, F32(LARGEST)), broken)
            positive = builder.fcmp_ordered(">", largest, F32(0.0))
            inverse = builder.select(positive, builder.fdiv(F32(LARGEST), largest), F32(0.0))
            rounded = [builder.call(nearest, [builder.fmul(part, splat(builder, inverse))]) for part in parts]
            # NaN has no integer.
            rounded = [builder.select(builder.fcmp_ordered("ord", each, each), each, zero) for each in rounded]
            whole = [builder.fptosi(each, DOUBLE_WORDS) for each in rounded]
            total = builder.call(sum_of, [builder.add(*whole)])
            into = builder.add(integers, builder.mul(loop.index, I64(BLOCK)))
            for number, each in enumerate(whole):
                store_vector(builder, builder.trunc(each, ir.VectorType(I8, 16)), builder.add(into, I64(16 * number)))
            place = builder.add(scales, builder.mul(loop.index, I64(4 * OF_BLOCK)))
            store_vector(builder, scale, place)
            store_vector(builder, builder.fmul(scale, builder.sitofp(total, F32)), builder.add(place, I64(4)))
            store_vector(builder, builder.mul(total, I32(-_ZERO_OF_8_BITS)), builder.add(place, I64(8)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, address), generate


@intrinsic(prefer_literal=True)
def multiply_integers(typing, bits, rows, integers, scales_of_rows, levels, scales, blocks, sums):
    """Writes the products of `rows` rows with a tile to float32 `sums [rows, 16]`.

    Constants: `bits` (4 or 8) and `rows`. Addresses: of `integers [rows, blocks, 32]` and `scales_of_rows
    [rows, blocks, 3]`, see `round_row`; of `levels` and `scales`, see `block_layout.PackedBlocks`.
    """
    if not (isinstance(bits, types.IntegerLiteral) and isinstance(rows, types.IntegerLiteral)):
        return None
    width, count = bits.literal_value, rows.literal_value

    def generate(context, builder, signature, values):
        _, _, integers, of_rows, levels, scales, blocks, sums = values
        add_products = llvm_function(builder, "llvm.x86.avx512.vpdpbusd.512", DOUBLE_WORDS, [DOUBLE_WORDS] * 3)
        multiply_add = llvm_function(builder, "llvm.fma.v16f32", FLOATS, [FLOATS] * 3)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, None)) for _ in range(count)]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            scale, least = _scales(builder, width, scales, loop.index)
            own = [
                builder.add(integers, builder.mul(builder.add(builder.mul(blocks, I64(row)), loop.index), I64(BLOCK)))
                for row in range(count)
            ]
            places = [
                builder.add(
                    of_rows,
                    builder.mul(builder.add(builder.mul(blocks, I64(row)), loop.index), I64(4 * OF_BLOCK)),
                )
                for row in range(count)
            ]
            found = [ir.Constant(DOUBLE_WORDS, None)] * count
            if least is None:
                zeros = [load_vector(builder, I32, builder.add(place, I64(8))) for place in places]
                found = [_in_all_lanes(builder, each) for each in zeros]
            for number, weights in enumerate(_levels(builder, width, levels, loop.index)):
                for row in range(count):
                    four = _in_all_lanes(builder, load_vector(builder, I32, builder.add(own[row], I64(4 * number))))
                    found[row] = builder.call(add_products, [found[row], weights, four])
            for row in range(count):
                factor, both = (
                    splat(builder, load_vector(builder, F32, builder.add(places[row], I64(offset))))
                    for offset in (0, 4)
                )
                total, products = builder.load(totals[row]), builder.sitofp(found[row], FLOATS)
                total = builder.call(multiply_add, [products, builder.fmul(scale, factor), total])
                if least is not None:
                    total = builder.call(multiply_add, [least, both, total])
                builder.store(total, totals[row])
        for row in range(count):
            store_vector(builder, builder.load(totals[row]), builder.add(sums, I64(4 * INTEGER_OUTPUTS * row)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(bits, rows, address, address, address, address, address, address), generate


def _levels(builder, bits, levels, block):
    """Four bytes of each of sixteen outputs, for each four inputs of a block."""
    size = INTEGER_OUTPUTS * BLOCK * bits // 8
    at = builder.add(levels, builder.mul(block, I64(size)))
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    low, four = (ir.Constant(DOUBLE_WORDS, [value] * 16) for value in (0x0F0F0F0F, 4))
    for line in range(0, size, 64):
        where = builder.inttoptr(builder.add(at, I64(_AHEAD + line)), pointer)
        builder.call(prefetch, [where, I32(0), I32(3), I32(1)])
        found = load_vector(builder, DOUBLE_WORDS, builder.add(at, I64(line)))
        if bits == 8:
            yield found
        else:
            yield builder.and_(found, low)
            yield builder.and_(builder.lshr(found, four), low)


def _scales(builder, bits, scales, block):
    """The scales of a block of sixteen outputs, and their minimums, or None for 8 bits."""
    halves, vectors = ir.VectorType(F16, 16), 2 if bits == 4 else 1
    at = builder.add(scales, builder.mul(block, I64(2 * INTEGER_OUTPUTS * vectors)))
    scale = builder.fpext(load_vector(builder, halves, at), FLOATS)
    if bits == 4:
        return scale, builder.fpext(load_vector(builder, halves, builder.add(at, I64(2 * INTEGER_OUTPUTS))), FLOATS)
    return scale, None


def _in_all_lanes(builder, value):
    one = builder.insert_element(ir.Constant(DOUBLE_WORDS, ir.Undefined), value, I32(0))
    return lanes(builder, one, [0] * 16)
