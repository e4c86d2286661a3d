"""Products of rows of int8 with a tile of a matrix of quantised values in blocks, a lane of a vector for each output.

A row is rounded to int8 in blocks of 32, as llama.cpp does: `value = scale * integer`, with the block's largest
absolute value at 127. A weight is `scale * level + least`, so a block's product is `scale_w * scale_x * sum(level *
integer) + least * scale_x * sum(integer)`. The sum of levels times integers is exact, whatever instructions add it (see
`byte_units`). Blocks are added in float32, in order, so a row has the same result, bit for bit, in any batch.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.checkpoint.encoding import BLOCK
from sglang_jax.cpu_kernels.byte_units import UNITS
from sglang_jax.cpu_kernels.integer_layout import OF_BLOCK
from sglang_jax.cpu_kernels.vectors import (
    DOUBLE_WORDS,
    F16,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    in_all_lanes,
    llvm_function,
    load_vector,
    splat,
    store_vector,
)

LARGEST = 127.0

_AHEAD = 4096
"""Bytes of quantised values that are prefetched."""

_ZERO_OF_8_BITS = 128
"""8-bit values are stored with this added, where one side of the product is unsigned."""


@intrinsic(prefer_literal=True)
def round_row(typing, width, x, blocks, integers, scales):
    """Rounds a row of bfloat16 or float32, `width` bytes each, a constant, to int8 `integers [blocks, 32]`,
    and writes `scales [blocks, 3]`: float32, the scale and the scale times the sum of the integers, both NaN for a
    block with NaN or infinity; int32, -128 times that sum."""

    if not isinstance(width, types.IntegerLiteral):
        return None
    size = width.literal_value

    def generate(context, builder, signature, values):
        _, x, blocks, integers, scales = values
        absolute = llvm_function(builder, "llvm.fabs.v16f32", FLOATS, [FLOATS])
        larger = llvm_function(builder, "llvm.maxnum.v16f32", FLOATS, [FLOATS] * 2)
        largest_of = llvm_function(builder, "llvm.vector.reduce.fmax.v16f32", F32, [FLOATS])
        sum_of = llvm_function(builder, "llvm.vector.reduce.add.v16i32", I32, [DOUBLE_WORDS])
        sum_of_floats = llvm_function(builder, "llvm.vector.reduce.fadd.v16f32", F32, [F32, FLOATS])
        nearest = llvm_function(builder, "llvm.rint.v16f32", FLOATS, [FLOATS])
        zero = ir.Constant(FLOATS, None)
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            at = builder.add(x, builder.mul(loop.index, I64(size * BLOCK)))
            parts = [_sixteen(builder, size, builder.add(at, I64(offset))) for offset in (0, size * BLOCK // 2)]
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
    return types.void(width, address, address, address, address), generate


def _sixteen(builder, width, address):
    """Sixteen activations of `width` bytes, as float32."""
    if width == 4:
        return load_vector(builder, FLOATS, address)
    words = builder.zext(load_vector(builder, ir.VectorType(I16, 16), address), DOUBLE_WORDS)
    return builder.bitcast(builder.shl(words, ir.Constant(DOUBLE_WORDS, [16] * 16)), FLOATS)


@intrinsic(prefer_literal=True)
def multiply_integers(typing, unit, bits, rows, integers, scales_of_rows, levels, scales, blocks, sums):
    """Writes the products of `rows` rows with a tile to float32 `sums [rows, outputs]`.

    Constants: `unit`, an index of `byte_units.UNITS`; `bits` (4 or 8); `rows`. Addresses: of `integers [rows, blocks,
    32]` and `scales_of_rows [rows, blocks, 3]`, see `round_row`; of `levels` and `scales`, see
    `integer_layout.pack_for_integers`.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (unit, bits, rows)):
        return None
    chosen, width, count = UNITS[unit.literal_value], bits.literal_value, rows.literal_value
    outputs = chosen.form.outputs
    floats = ir.VectorType(F32, outputs)

    def generate(context, builder, signature, values):
        _, _, _, integers, of_rows, levels, scales, blocks, sums = values
        # One rounding where the processor can, else two; LLVM chooses the same for any number of rows.
        multiply_add = llvm_function(builder, f"llvm.fmuladd.v{outputs}f32", floats, [floats] * 3)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in range(count)]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            scale, least = _scales(builder, chosen, width, scales, loop.index)
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
            corrections = [None] * count
            if width == 8 and chosen.form.zero:
                corrections = [load_vector(builder, I32, builder.add(place, I64(8))) for place in places]
            found = [chosen.begin(builder, each) for each in corrections]
            for number, weights in enumerate(_levels(builder, outputs, width, levels, loop.index)):
                for row in range(count):
                    word = load_vector(builder, I32, builder.add(own[row], I64(4 * number)))
                    four = in_all_lanes(builder, word, outputs)
                    found[row] = chosen.add(builder, width, found[row], weights, four)
            for row in range(count):
                factor, both = (
                    in_all_lanes(builder, load_vector(builder, F32, builder.add(places[row], I64(offset))), outputs)
                    for offset in (0, 4)
                )
                products = builder.sitofp(chosen.finish(builder, width, found[row]), floats)
                total = builder.load(totals[row])
                total = builder.call(multiply_add, [products, builder.fmul(scale, factor), total])
                if least is not None:
                    total = builder.call(multiply_add, [least, both, total])
                builder.store(total, totals[row])
        for row in range(count):
            store_vector(builder, builder.load(totals[row]), builder.add(sums, I64(4 * outputs * row)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(unit, bits, rows, address, address, address, address, address, address), generate


def _levels(builder, outputs, bits, levels, block):
    """Four bytes of each output, for each four inputs of a block."""
    size = outputs * BLOCK * bits // 8
    at = builder.add(levels, builder.mul(block, I64(size)))
    pointer, words = I8.as_pointer(), ir.VectorType(I32, outputs)
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    low, four = (ir.Constant(words, [value] * outputs) for value in (0x0F0F0F0F, 4))
    for offset in range(0, size, 4 * outputs):
        if offset % 64 == 0:
            where = builder.inttoptr(builder.add(at, I64(_AHEAD + offset)), pointer)
            builder.call(prefetch, [where, I32(0), I32(3), I32(1)])
        found = load_vector(builder, words, builder.add(at, I64(offset)))
        if bits == 8:
            yield found
        else:
            yield builder.and_(found, low)
            yield builder.and_(builder.lshr(found, four), low)


def _scales(builder, unit, bits, scales, block):
    """The scales of a block of each output, and their minimums, or None for 8 bits."""
    outputs, vectors = unit.form.outputs, 2 if bits == 4 else 1
    at = builder.add(scales, builder.mul(block, I64(2 * outputs * vectors)))
    scale, *least = (
        unit.widen_halves(
            builder, load_vector(builder, ir.VectorType(F16, outputs), builder.add(at, I64(2 * outputs * number)))
        )
        for number in range(vectors)
    )
    return scale, least[0] if least else None
