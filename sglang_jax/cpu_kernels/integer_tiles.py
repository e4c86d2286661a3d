"""Products of rows of int8 with a tile of a matrix of quantised values in blocks, a lane of a vector for each output.

A row is rounded to int8 in blocks of 32, as llama.cpp does: `value = scale * integer`, with the block's largest
absolute value at 127. A weight is `scale * (level - zero) + offset`, so a block's product is `scale_w * scale_x *
(sum(level * integer) - zero * sum(integer)) + offset * scale_x * sum(integer)`. The sums of integers are exact,
whatever instructions add them (see `byte_units`). Blocks are added in float32, in order, so a row has the same result,
bit for bit, in any batch.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.cpu_kernels.byte_units import UNITS, ByteUnit
from sglang_jax.cpu_kernels.integer_layout import ALL_KINDS, OF_BLOCK, SMALLEST, SUPER_BLOCK, LevelKind
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


@intrinsic(prefer_literal=True)
def round_row(typing, unit, number, width, x, blocks, integers, scales):
    """Rounds a row of bfloat16 or float32, `width` bytes each, to int8 `integers [blocks, 32]`, and writes `scales
    [blocks, 4]`: float32, the scale and the scale times the sum of the integers, both NaN for a block with NaN or
    infinity; int32, that sum times the negative zero of the levels, of the block or of each half, as they share scales.
    Constants: `unit`, an index of `byte_units.UNITS`; `number`, an index of `ALL_KINDS`; `width`."""

    if not all(isinstance(each, types.IntegerLiteral) for each in (unit, number, width)):
        return None
    size, kind = width.literal_value, ALL_KINDS[number.literal_value]
    level_zero = _zero(UNITS[unit.literal_value], kind)

    def generate(context, builder, signature, values):
        _, _, _, x, blocks, integers, scales = values
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
            broken = builder.call(sum_of_floats, [F32(0.0), nothing], fastmath=("reassoc",))
            scale = builder.fadd(builder.fdiv(largest, F32(LARGEST)), broken)
            some = builder.fcmp_ordered(">", largest, F32(SMALLEST))
            inverse = builder.select(some, builder.fdiv(F32(LARGEST), largest), F32(0.0))
            rounded = [builder.call(nearest, [builder.fmul(part, splat(builder, inverse))]) for part in parts]
            # NaN has no integer.
            rounded = [builder.select(builder.fcmp_ordered("ord", each, each), each, zero) for each in rounded]
            whole = [builder.fptosi(each, DOUBLE_WORDS) for each in rounded]
            halves = whole if kind.parts == 2 else [builder.add(*whole)]
            sums = [builder.call(sum_of, [each]) for each in halves]
            total = sums[0] if len(sums) == 1 else builder.add(*sums)
            into = builder.add(integers, builder.mul(loop.index, I64(BLOCK)))
            for number, each in enumerate(whole):
                store_vector(builder, builder.trunc(each, ir.VectorType(I8, 16)), builder.add(into, I64(16 * number)))
            place = builder.add(scales, builder.mul(loop.index, I64(4 * OF_BLOCK)))
            store_vector(builder, scale, place)
            store_vector(builder, builder.fmul(scale, builder.sitofp(total, F32)), builder.add(place, I64(4)))
            for number, each in enumerate(sums if level_zero else ()):
                correction = builder.mul(each, I32(-level_zero))
                store_vector(builder, correction, builder.add(place, I64(8 + 4 * number)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(unit, number, width, address, address, address, address), generate


def _zero(unit: ByteUnit, kind: LevelKind) -> int:
    """What stored levels have in excess."""
    return unit.form.zero if kind.bits == 8 else kind.zero


def _sixteen(builder, width, address):
    """Sixteen activations of `width` bytes, as float32."""
    if width == 4:
        return load_vector(builder, FLOATS, address)
    words = builder.zext(load_vector(builder, ir.VectorType(I16, 16), address), DOUBLE_WORDS)
    return builder.bitcast(builder.shl(words, ir.Constant(DOUBLE_WORDS, [16] * 16)), FLOATS)


@intrinsic(prefer_literal=True)
def multiply_integers(typing, unit, number, rows, integers, scales_of_rows, levels, scales, blocks, sums):
    """Writes the products of `rows` rows with a tile to float32 `sums [rows, outputs]`.

    Constants: `unit`, an index of `byte_units.UNITS`; `number`, one of `ALL_KINDS`; `rows`. Addresses: of `integers
    [rows, blocks, 32]` and `scales_of_rows [rows, blocks, 4]`, see `round_row`; of `levels` and `scales`, see
    `integer_layout.pack_for_integers`.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (unit, number, rows)):
        return None
    chosen, kind, count = UNITS[unit.literal_value], ALL_KINDS[number.literal_value], rows.literal_value
    words = BLOCK // kind.parts // 4
    outputs = chosen.form.outputs
    floats = ir.VectorType(F32, outputs)

    def generate(context, builder, signature, values):
        _, _, _, integers, of_rows, levels, scales, blocks, sums = values
        # One rounding where the processor can, else two; LLVM chooses the same for any number of rows.
        multiply_add = llvm_function(builder, f"llvm.fmuladd.v{outputs}f32", floats, [floats] * 3)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(floats, None)) for _ in range(count)]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            numbers = _scales(builder, chosen, kind, scales, loop.index)
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
            all_levels = _levels(builder, chosen, kind, levels, loop.index)
            for part, (scale, least) in enumerate(numbers):
                corrections = [None] * count
                if _zero(chosen, kind):
                    at = I64(8 + 4 * part)
                    corrections = [load_vector(builder, I32, builder.add(place, at)) for place in places]
                found = [chosen.begin(builder, each) for each in corrections]
                for four_inputs in range(part * words, (part + 1) * words):
                    weights = next(all_levels)
                    for row in range(count):
                        word = load_vector(builder, I32, builder.add(own[row], I64(4 * four_inputs)))
                        four = in_all_lanes(builder, word, outputs)
                        found[row] = chosen.add(builder, kind.bits_multiplied, found[row], weights, four)
                for row in range(count):
                    factor, both = (
                        in_all_lanes(builder, load_vector(builder, F32, builder.add(places[row], I64(offset))), outputs)
                        for offset in (0, 4)
                    )
                    products = builder.sitofp(chosen.finish(builder, found[row]), floats)
                    total = builder.load(totals[row])
                    by = factor if scale is None else builder.fmul(scale, factor)
                    total = builder.call(multiply_add, [products, by, total])
                    if least is not None:
                        total = builder.call(multiply_add, [least, both, total])
                    builder.store(total, totals[row])
        for row in range(count):
            total = builder.load(totals[row])
            if kind.group is None:
                total = builder.fmul(total, load_vector(builder, floats, scales))
            store_vector(builder, total, builder.add(sums, I64(4 * outputs * row)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(unit, number, rows, address, address, address, address, address, address), generate


def _levels(builder, unit, kind, levels, block):
    """Four bytes of each output, for each four inputs of a block."""
    outputs = unit.form.outputs
    size = kind.level_bytes(outputs)
    at = builder.add(levels, builder.mul(block, I64(size)))
    words = ir.VectorType(I32, outputs)

    def vector(number):
        return load_vector(builder, words, builder.add(at, I64(4 * outputs * number)))

    def all_lanes(value):
        return ir.Constant(words, [value] * outputs)

    for offset in range(0, size, 64):
        _prefetch(builder, builder.add(at, I64(_AHEAD + offset)))
    if kind.bits == 8:
        yield from (vector(number) for number in range(8))
        return
    upper_bits, low = kind.bits - 4, all_lanes(0x0F0F0F0F)
    upper = [vector(4 + number) for number in range(upper_bits)]
    for group in range(8):
        if group % 2 == 0:
            both = vector(group // 2)
        found = builder.and_(builder.lshr(both, all_lanes(4)) if group % 2 else both, low)
        if upper_bits:
            in_byte = 8 // upper_bits
            own = _moved(builder, upper[group // in_byte], 4 - group % in_byte * upper_bits)
            mask = all_lanes(((1 << upper_bits) - 1) * 0x10101010)
            found = builder.or_(found, builder.and_(own, mask))
        yield unit.look_up(builder, kind.table, found) if kind.table else found


def _moved(builder, vector, left):
    """Words shifted to the left, or to the right for a negative number."""
    by = ir.Constant(vector.type, [abs(left)] * vector.type.count)
    return builder.shl(vector, by) if left >= 0 else builder.lshr(vector, by)


def _prefetch(builder, address):
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, pointer), I32(0), I32(3), I32(1)])


def _scales(builder, unit, kind, scales, block):
    """For each part of a block that shares a scale: the scales of each output, None if all of a row share one, and
    their offsets, or None."""
    if kind.group is None:
        return [(None, None)]
    outputs, count = unit.form.outputs, kind.numbers
    halves, floats = ir.VectorType(F16, outputs), ir.VectorType(F32, outputs)

    def widened(address):
        size = 4 if kind.wide else 2
        places = [builder.add(address, I64(size * outputs * number)) for number in range(count)]
        if kind.wide:
            return [load_vector(builder, floats, place) for place in places]
        return [unit.widen_halves(builder, load_vector(builder, halves, place)) for place in places]

    if not kind.factors:
        together = kind.blocks_with_scales
        group = block if together == 1 else builder.sdiv(block, I64(together))
        size = kind.scale_bytes(outputs)
        first = builder.add(scales, builder.mul(group, I64(size)))
        found = [widened(builder.add(first, I64(part * size // kind.parts))) for part in range(kind.parts)]
    else:
        super_block, own = (f(block, I64(SUPER_BLOCK)) for f in (builder.sdiv, builder.srem))
        first = builder.add(scales, builder.mul(super_block, I64(kind.scale_bytes(outputs))))
        factors = widened(first)
        parts = kind.parts
        bytes_at = builder.add(first, I64(2 * outputs * count))
        bytes_at = builder.add(bytes_at, builder.mul(own, I64(parts * count * outputs)))
        found = []
        for part in range(parts):
            places = (builder.add(bytes_at, I64((part * count + number) * outputs)) for number in range(count))
            loaded = (load_vector(builder, ir.VectorType(I8, outputs), place) for place in places)
            wide = [builder.sitofp(builder.sext(each, ir.VectorType(I32, outputs)), floats) for each in loaded]
            found.append([builder.fmul(*pair) for pair in zip(wide, factors, strict=True)])
    return [(numbers[0], numbers[1] if kind.offsets else None) for numbers in found]
