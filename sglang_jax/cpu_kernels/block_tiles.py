"""Products of rows of bfloat16 with a tile of a matrix of quantised values in blocks: four outputs at a time.

A weight is `scale * level + least`, with a scale and a minimum for its block of 32. It is widened in registers and
rounded to bfloat16, to the same bits as in the widened matrix in memory. Pairs of products are added in float32
(`vdpbf16ps`), one block of a tile after the other, so a row has the same result, bit for bit, in any batch. For 4 bits,
the 16 possible weights of a block are computed first, and looked up by `vpermw`, which reads only five bits of each
16-bit word. Words hold values of all four outputs: three shifts move each to the lowest bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.cpu_kernels.block_layout import OUTPUTS
from sglang_jax.cpu_kernels.vectors import (
    DOUBLE_WORDS,
    F16,
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    WORDS,
    add_products,
    lanes,
    llvm_function,
    load_vector,
    round_to_bfloat16,
    splat,
    store_vector,
)

MAX_ROWS = 6
"""Rows of activations that are multiplied at once: as many sums as fit into registers with the weights."""

FEW_ROWS = 4
"""Up to this many rows are multiplied by weights widened in registers; for more, a tile is widened first, once."""

_AHEAD = 4608
"""Bytes of quantised values that are prefetched: the processor's own prefetch is too late."""


@intrinsic
def widen_halves(typing, source, target, count):
    """Copies `count` float16 at `source`, a multiple of 8, to float32 at `target`."""

    def generate(context, builder, signature, values):
        source, target, count = values
        halves, floats = ir.VectorType(F16, 8), ir.VectorType(F32, 8)
        with cgutils.for_range_slice(builder, I64(0), count, I64(8), I64) as (at, _):
            found = load_vector(builder, halves, builder.add(source, builder.mul(at, I64(2))))
            store_vector(builder, builder.fpext(found, floats), builder.add(target, builder.mul(at, I64(4))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def multiply_tile(typing, bits, rows, x, stride, levels, scales, blocks, sums):
    """Writes the products of `rows` rows of bfloat16 with a tile to float32 `sums [rows, 4]`.

    Constants: `bits` (4, 8, or 16 for widened weights) and `rows`. Addresses: of `x`, with rows `stride` bytes apart;
    of `levels [blocks]`: 4 bits as uint16 `[32]`, of which output j has bits `4j` to `4j + 3`, 8 bits as int8 `[4,
    32]`, 16 bits as bfloat16 `[4, 32]`; of float32 `scales [blocks, 8]`, four scales and four minimums, for 8 bits
    `[blocks, 4]`.
    """
    if not (isinstance(bits, types.IntegerLiteral) and isinstance(rows, types.IntegerLiteral)):
        return None
    widen = _WEIGHTS[bits.literal_value]
    count = rows.literal_value

    def generate(context, builder, signature, values):
        _, _, x, stride, levels, scales, blocks, sums = values
        zero = ir.Constant(FLOATS, None)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(OUTPUTS)] for _ in range(count)]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            offset = builder.mul(loop.index, I64(2 * BLOCK))
            _prefetch(builder, bits.literal_value, levels, loop.index)
            activations = [
                load_vector(builder, WORDS, builder.add(builder.add(x, builder.mul(stride, I64(row))), offset))
                for row in range(count)
            ]
            for output, weights in enumerate(widen(builder, levels, scales, loop.index)):
                for row in range(count):
                    total = totals[row][output]
                    builder.store(add_products(builder, builder.load(total), weights, activations[row]), total)
        for row in range(count):
            found = _sums(builder, [builder.load(total) for total in totals[row]])
            store_vector(builder, found, builder.add(sums, I64(4 * OUTPUTS * row)))
        return context.get_dummy_value()

    address = types.int64
    return types.void(bits, rows, address, address, address, address, address, address), generate


@intrinsic(prefer_literal=True)
def widen_tile(typing, bits, levels, scales, blocks, target):
    """Writes the weights of a tile (see `multiply_tile`) as bfloat16 `[blocks, 4, 32]` to `target`."""
    if not isinstance(bits, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):
        _, levels, scales, blocks, target = values
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            _prefetch(builder, bits.literal_value, levels, loop.index)
            first = builder.mul(loop.index, I64(OUTPUTS))
            for output, weights in enumerate(_WEIGHTS[bits.literal_value](builder, levels, scales, loop.index)):
                place = builder.mul(builder.add(first, I64(output)), I64(2 * BLOCK))
                store_vector(builder, weights, builder.add(target, place))
        return context.get_dummy_value()

    address = types.int64
    return types.void(bits, address, address, address, address), generate


def _four_bits(builder, levels, scales, block):
    """The 32 weights of a block for each output, as words."""
    found = load_vector(builder, WORDS, builder.add(levels, builder.mul(block, I64(2 * BLOCK))))
    own = builder.add(scales, builder.mul(block, I64(4 * 2 * OUTPUTS)))
    every_level = ir.Constant(FLOATS, [float(level) for level in range(16)])
    multiply_add = llvm_function(builder, "llvm.fma.v16f32", FLOATS, [FLOATS] * 3)
    look_up = llvm_function(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, [WORDS, WORDS])
    for output in range(OUTPUTS):
        scale = splat(builder, load_vector(builder, F32, builder.add(own, I64(4 * output))))
        least = splat(builder, load_vector(builder, F32, builder.add(own, I64(4 * (OUTPUTS + output)))))
        weights = builder.call(multiply_add, [every_level, scale, least])
        table = round_to_bfloat16(builder, weights, weights)
        shift = ir.Constant(WORDS, [4 * output] * BLOCK)
        yield builder.call(look_up, [table, builder.lshr(found, shift) if output else found])


def _eight_bits(builder, levels, scales, block):
    halves = ir.VectorType(I8, 16)
    for output in range(OUTPUTS):
        place = builder.add(builder.mul(block, I64(OUTPUTS)), I64(output))
        scale = splat(builder, load_vector(builder, F32, builder.add(scales, builder.mul(place, I64(4)))))
        own = builder.add(levels, builder.mul(place, I64(BLOCK)))
        low, high = (
            builder.fmul(builder.sitofp(builder.sext(load_vector(builder, halves, at), DOUBLE_WORDS), FLOATS), scale)
            for at in (own, builder.add(own, I64(16)))
        )
        yield round_to_bfloat16(builder, low, high)


def _widened(builder, weights, scales, block):
    for output in range(OUTPUTS):
        place = builder.add(builder.mul(block, I64(OUTPUTS)), I64(output))
        yield load_vector(builder, WORDS, builder.add(weights, builder.mul(place, I64(2 * BLOCK))))


_WEIGHTS = {4: _four_bits, 8: _eight_bits, 16: _widened}


def _sums(builder, totals):
    """The sum of each of four vectors of 16, added in a fixed order: a vector of four."""
    parts = totals
    while parts[0].type.count > OUTPUTS:
        half = parts[0].type.count // 2
        low, high = range(half), range(half, 2 * half)
        parts = [builder.fadd(lanes(builder, part, low), lanes(builder, part, high)) for part in parts]
    pairs = [lanes(builder, parts[at], (0, 4, 1, 5, 2, 6, 3, 7), parts[at + 1]) for at in (0, 2)]
    halves = [builder.fadd(lanes(builder, pair, range(4)), lanes(builder, pair, range(4, 8))) for pair in pairs]
    low = lanes(builder, halves[0], (0, 1, 4, 5), halves[1])
    high = lanes(builder, halves[0], (2, 3, 6, 7), halves[1])
    return builder.fadd(low, high)


def _prefetch(builder, bits, levels, block):
    """Prefetches the values of a block that is multiplied later; the address need not be valid."""
    if bits == 16:
        return
    size = OUTPUTS * BLOCK * bits // 8
    at = builder.add(levels, builder.mul(block, I64(size)))
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for line in range(0, size, 64):
        where = builder.inttoptr(builder.add(at, I64(_AHEAD + line)), pointer)
        builder.call(function, [where, I32(0), I32(3), I32(1)])
