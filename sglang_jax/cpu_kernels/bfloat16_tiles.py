"""Products of rows of float32 with a tile of a matrix of bfloat16: four outputs at a time.

A bfloat16 is the upper half of a float32, so a weight is widened by a shift. A vector has inputs side by side. Each
lane of a sum adds its own inputs in order, and the lanes are added at the end. So a row has the same result, bit for
bit, in any batch, whether weights are widened in registers or in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sglang_jax.cpu_kernels.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    lanes,
    llvm_function,
    load_vector,
    store_vector,
    supported,
)

OUTPUTS = 4
"""Rows of the matrix in a tile."""

_CACHE_LINE = 64


@dataclass(frozen=True, slots=True)
class FloatVectors:
    """Vectors of `lanes` float32. LLVM fuses products and sums if the processor can.

    - `rows`: how many are multiplied at once: as many as fit into registers with widened weights.
    - `few`: as many as fit with weights that are widened in registers.
    """

    lanes: int
    rows: int
    few: int

    @property
    def block(self) -> int:
        """Inputs that are multiplied at once."""
        return 2 * self.lanes


SIXTEENS, EIGHTS, FOURS = FloatVectors(16, 6, 4), FloatVectors(8, 3, 2), FloatVectors(4, 3, 2)
"""Vectors of 512 bits with 32 registers; of 256 bits and of 128 bits with 16 registers."""

_BY_FEATURES = ((("avx512bw",), SIXTEENS), (("avx2",), EIGHTS))


def best_vectors() -> FloatVectors:
    """Those of this processor."""
    return next((own for needed, own in _BY_FEATURES if supported(needed)), FOURS)


@intrinsic(prefer_literal=True)
def multiply_weights(
    typing, size, count, bits, blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap
):
    """Multiplies rows by a tile's weights of `blocks` blocks of inputs.

    Constants: `size`, the lanes; `count` of rows; `bits` of weights. Addresses: `x`, float32, with rows `stride` bytes
    apart; `weights`, bfloat16, with rows `step` bytes apart, or, with 32 bits, see `widen_weights`; with 16 bits
    `ahead`, what to prefetch meanwhile; `totals`, float32 `[count, 4, lanes]`, sums so far: read unless this `begins`,
    and written unless it `ends` a product, whose sums are then written to `sums [count, 4]`, with rows `gap` bytes
    apart."""
    constants = (size, count, bits)
    if not all(isinstance(each, types.IntegerLiteral) for each in constants):
        return None
    width, rows, narrow = size.literal_value, count.literal_value, bits.literal_value == 16
    floats = ir.VectorType(F32, width)

    def generate(context, builder, signature, values):
        blocks, x, stride, weights, step, ahead, begins, ends, totals, sums, gap = values[len(constants) :]
        multiply_add = llvm_function(builder, f"llvm.fmuladd.v{width}f32", floats, [floats] * 3)
        first, last = (builder.icmp_signed("!=", flag, I64(0)) for flag in (begins, ends))
        places = [builder.add(totals, I64(4 * width * at)) for at in range(rows * OUTPUTS)]
        zero = ir.Constant(floats, None)
        own = [
            cgutils.alloca_once_value(builder, builder.select(first, zero, load_vector(builder, floats, place)))
            for place in places
        ]
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            at = builder.add(x, builder.mul(loop.index, I64(8 * width)))
            activations = [_two(builder, width, builder.add(at, builder.mul(stride, I64(row)))) for row in range(rows)]
            if narrow:
                _prefetch(builder, width, ahead, loop.index)
            for output in range(OUTPUTS):
                if narrow:
                    found = list(_widened(builder, width, weights, step, loop.index, output))
                else:
                    place = builder.add(weights, builder.mul(loop.index, I64(8 * width * OUTPUTS)))
                    found = _two(builder, width, builder.add(place, I64(8 * width * output)))
                for half in range(2):
                    for row in range(rows):
                        total = own[row * OUTPUTS + output]
                        operands = [activations[row][half], found[half], builder.load(total)]
                        builder.store(builder.call(multiply_add, operands), total)
        with builder.if_else(last) as (finish, keep):
            with finish:
                for row in range(rows):
                    of_row = [builder.load(total) for total in own[row * OUTPUTS :][:OUTPUTS]]
                    store_vector(builder, _added_up(builder, of_row), builder.add(sums, builder.mul(gap, I64(row))))
            with keep:
                for total, place in zip(own, places, strict=True):
                    store_vector(builder, builder.load(total), place)
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 11), generate


@intrinsic(prefer_literal=True)
def widen_weights(typing, size, blocks, weights, step, ahead, target):
    """Writes a tile's weights of `blocks` blocks of inputs as float32 `[blocks, 4, block]`: see `multiply_weights`."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    width = size.literal_value

    def generate(context, builder, signature, values):
        _, blocks, weights, step, ahead, target = values
        with cgutils.for_range(builder, blocks, intp=I64) as loop:
            _prefetch(builder, width, ahead, loop.index)
            into = builder.add(target, builder.mul(loop.index, I64(8 * width * OUTPUTS)))
            for output in range(OUTPUTS):
                for half, found in enumerate(_widened(builder, width, weights, step, loop.index, output)):
                    store_vector(builder, found, builder.add(into, I64(4 * width * (2 * output + half))))
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 5), generate


def _two(builder, width, address):
    """Two adjacent vectors of float32."""
    floats = ir.VectorType(F32, width)
    return [load_vector(builder, floats, builder.add(address, I64(at))) for at in (0, 4 * width)]


def _widened(builder, width, weights, step, block, output):
    """A block of an output's weights, as two vectors of float32."""
    start = builder.add(weights, builder.mul(step, I64(output)))
    words, floats = ir.VectorType(I32, width), ir.VectorType(F32, width)
    for half in range(2):
        at = builder.add(start, builder.add(builder.mul(block, I64(4 * width)), I64(2 * width * half)))
        found = builder.zext(load_vector(builder, ir.VectorType(I16, width), at), words)
        yield builder.bitcast(builder.shl(found, ir.Constant(words, [16] * width)), floats)


def _added_up(builder, parts):
    """A vector of the sums of four vectors, each added in the same order."""

    def added(*both):
        # With its own flag, so that numba does not allow another order.
        return builder.fadd(*both, flags=("nsz",))

    while parts[0].type.count > OUTPUTS:
        half = parts[0].type.count // 2
        sides = range(half), range(half, 2 * half)
        parts = [added(*(lanes(builder, part, side) for side in sides)) for part in parts]
    while len(parts) > 1:
        parts = [
            added(*(lanes(builder, one, range(first, 2 * OUTPUTS, 2), other) for first in range(2)))
            for one, other in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _prefetch(builder, width, ahead, block):
    """Prefetches as many bytes as a tile's weights of a block have; the address need not be valid. Into the second
    cache: in the first, they would displace rows."""
    size = 4 * width * OUTPUTS
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for line in range(0, size, _CACHE_LINE):
        at = builder.add(ahead, builder.add(builder.mul(block, I64(size)), I64(line)))
        builder.call(function, [builder.inttoptr(at, pointer), I32(0), I32(2), I32(1)])
