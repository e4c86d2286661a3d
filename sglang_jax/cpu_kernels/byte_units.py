"""Instructions of processors that multiply bytes, with a common interface for kernels (see `integer_tiles`).

Each lane of a vector is a word of four bytes: four inputs of one output of a matrix, times the same four inputs of a
row in all lanes. A unit adds these products over the eight words of a block of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from sglang_jax.cpu_kernels.block_layout import BlockForm
from sglang_jax.cpu_kernels.integer_layout import EIGHT_OUTPUTS, EIGHT_SIGNED_OUTPUTS, SIXTEEN_OUTPUTS
from sglang_jax.cpu_kernels.vectors import F32, I8, I16, I32, in_all_lanes, llvm_function, supported


class ByteUnit(Protocol):
    """- `name`: as in the log.
    - `form`: layout of matrices, whose tiles have as many outputs as a vector has lanes.
    - `rows`: numbers of rows that are multiplied together: as many as fit into registers, fewer, and 1."""

    @property
    def name(self) -> str: ...

    @property
    def form(self) -> BlockForm: ...

    @property
    def rows(self) -> tuple[int, int, int]: ...

    def found(self) -> bool:
        """Whether this processor has the instructions."""
        ...

    def begin(self, builder, correction):
        """The sum before the first word. `correction`: its value, int32; None for 0."""
        ...

    def add(self, builder, bits, total, weights, activations):
        """Returns a sum to which the products of a word of each lane are added. Weights are unsigned, of `bits` bits;
        those of 8 bits are signed, or have 128 added, as the layout says."""
        ...

    def finish(self, builder, total):
        """The sum as int32 in each lane."""
        ...

    def widen_halves(self, builder, halves):
        """float16 to float32."""
        ...

    def look_up(self, builder, table, words):
        """The numbers of a table of 16 bytes in place of each of the four bytes of each lane, which are below 16."""
        ...


@dataclass(frozen=True, slots=True)
class DotProducts:
    """`vpdpbusd`: multiplies four unsigned by four signed bytes in each lane and adds them, in one instruction."""

    name: str
    form: BlockForm
    rows: tuple[int, int, int]
    features: tuple[tuple[str, ...], ...]
    """Any of these groups of features is enough."""

    def found(self) -> bool:
        return any(supported(each) for each in self.features)

    def begin(self, builder, correction):
        if correction is None:
            return ir.Constant(_words(self.form), None)
        return in_all_lanes(builder, correction, self.form.outputs)

    def add(self, builder, bits, total, weights, activations):
        words = _words(self.form)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * words.count}"
        return builder.call(llvm_function(builder, name, words, [words] * 3), [total, weights, activations])

    def finish(self, builder, total):
        return total

    def widen_halves(self, builder, halves):
        return builder.fpext(halves, ir.VectorType(F32, halves.type.count))

    def look_up(self, builder, table, words):
        return _shuffled(builder, table, words)


@dataclass(frozen=True, slots=True)
class _SumOfPairs:
    """A sum of `PairsOfBytes`: int32, and int16 `pairs`, to which `words` words were added; None for 0."""

    total: ir.Value | None
    pairs: ir.Value | None = None
    words: int = 0


@dataclass(frozen=True, slots=True)
class PairsOfBytes:
    """`vpmaddubsw`: multiplies unsigned by signed bytes and adds pairs of products to int16, with saturation. A pair
    with levels of 4 bits is at most 2 * 15 * 127, so that eight words fit into int16, of 5 bits four and of 6 bits two.
    A pair of 8-bit values, at most 2 * 128 * 127, fits too."""

    name: str
    form: BlockForm
    rows: tuple[int, int, int]

    def found(self) -> bool:
        return supported(("avx2", "fma", "f16c"))

    def begin(self, builder, correction):
        return _SumOfPairs(None if correction is None else in_all_lanes(builder, correction, 8))

    def add(self, builder, bits, total, weights, activations):
        weights, activations = (builder.bitcast(each, _BYTES) for each in (weights, activations))
        products = llvm_function(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [_BYTES] * 2)
        if bits == 8:
            pairs = self._signed(builder, products, weights, activations)
            return self._widened(builder, _SumOfPairs(total.total, pairs, 1))
        pairs = builder.call(products, [weights, activations])
        if total.pairs is not None:
            pairs = builder.add(total.pairs, pairs)
        found = _SumOfPairs(total.total, pairs, total.words + 1)
        return self._widened(builder, found) if found.words == 2 ** (7 - bits) else found

    def finish(self, builder, total):
        return self._widened(builder, total).total

    def widen_halves(self, builder, halves):
        return builder.fpext(halves, ir.VectorType(F32, halves.type.count))

    def look_up(self, builder, table, words):
        return _shuffled(builder, table, words)

    def _signed(self, builder, products, weights, activations):
        # The sign moves to the activations, of which none is -128.
        negative = builder.icmp_signed("<", weights, ir.Constant(_BYTES, None))
        size = builder.select(negative, builder.sub(ir.Constant(_BYTES, None), weights), weights)
        signed = llvm_function(builder, "llvm.x86.avx2.psign.b", _BYTES, [_BYTES] * 2)
        return builder.call(products, [size, builder.call(signed, [activations, weights])])

    def _widened(self, builder, found):
        """Adds the pairs to int32."""
        if found.pairs is None:
            return found
        add_pairs = llvm_function(builder, "llvm.x86.avx2.pmadd.wd", _EIGHT, [_PAIRS] * 2)
        sums = builder.call(add_pairs, [found.pairs, ir.Constant(_PAIRS, [1] * 16)])
        return _SumOfPairs(sums if found.total is None else builder.add(found.total, sums))


@dataclass(frozen=True, slots=True)
class AnyProcessor:
    """Operations that LLVM compiles for any processor: products of int32."""

    name: str
    form: BlockForm
    rows: tuple[int, int, int]

    def found(self) -> bool:
        return True

    def begin(self, builder, correction):
        return ir.Constant(_EIGHT, None) if correction is None else in_all_lanes(builder, correction, 8)

    def add(self, builder, bits, total, weights, activations):
        for byte in range(4):
            up, down = (ir.Constant(_EIGHT, [shift] * 8) for shift in (24 - 8 * byte, 24))
            pair = (builder.ashr(builder.shl(each, up), down) for each in (weights, activations))
            total = builder.add(total, builder.mul(*pair))
        return total

    def finish(self, builder, total):
        return total

    def widen_halves(self, builder, halves):
        """Moves exponent and mantissa to their places, and multiplies by the difference of the exponents' biases: a
        processor may have no instruction for it. Numbers without an exponent are multiplied as integers: in this place
        they would be too small for float32, and XLA's threads read such numbers as 0."""
        words = builder.zext(builder.bitcast(halves, ir.VectorType(I16, 8)), _EIGHT)

        def all_lanes(value):
            return ir.Constant(_EIGHT, [value] * 8)

        sign = builder.shl(builder.and_(words, all_lanes(0x8000)), all_lanes(16))
        bits = builder.and_(words, all_lanes(0x7FFF))
        size = builder.bitcast(builder.shl(bits, all_lanes(13)), _EIGHT_FLOATS)
        finite = builder.fmul(size, ir.Constant(_EIGHT_FLOATS, [2.0**112] * 8))
        small = builder.fmul(builder.sitofp(bits, _EIGHT_FLOATS), ir.Constant(_EIGHT_FLOATS, [2.0**-24] * 8))
        finite = builder.select(builder.icmp_unsigned("<", bits, all_lanes(0x400)), small, finite)
        special = builder.icmp_unsigned(">=", bits, all_lanes(0x7C00))
        largest = builder.or_(builder.bitcast(finite, _EIGHT), all_lanes(0x7F800000))
        found = builder.select(special, largest, builder.bitcast(finite, _EIGHT))
        return builder.bitcast(builder.or_(found, sign), _EIGHT_FLOATS)

    def look_up(self, builder, table, words):
        """Compares bytes with each index: a processor may have no instruction for it."""
        indices = builder.bitcast(words, _BYTES)
        found = ir.Constant(_BYTES, [table[0]] * 32)
        for index, number in enumerate(table[1:], 1):
            own = builder.icmp_unsigned("==", indices, ir.Constant(_BYTES, [index] * 32))
            found = builder.select(own, ir.Constant(_BYTES, [number] * 32), found)
        return builder.bitcast(found, _EIGHT)


_BYTES, _PAIRS, _EIGHT = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)
_EIGHT_FLOATS = ir.VectorType(F32, 8)


def _shuffled(builder, table, words):
    """`vpshufb`: each byte of a vector's 16 selects one of the table's."""
    size = 4 * words.type.count
    name = {32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}[size]
    vector = ir.VectorType(I8, size)
    repeated = ir.Constant(vector, list(table) * (size // len(table)))
    found = builder.call(llvm_function(builder, name, vector, [vector] * 2), [repeated, builder.bitcast(words, vector)])
    return builder.bitcast(found, words.type)


def _words(form: BlockForm) -> ir.VectorType:
    return ir.VectorType(I32, form.outputs)


UNITS: tuple[ByteUnit, ...] = (
    DotProducts("avx512_vnni", SIXTEEN_OUTPUTS, (8, 4, 1), (("avx512bw", "avx512vnni"),)),
    DotProducts("avx_vnni", EIGHT_OUTPUTS, (4, 2, 1), (("avxvnni", "fma", "f16c"), ("avx512vl", "avx512vnni"))),
    PairsOfBytes("avx2", EIGHT_SIGNED_OUTPUTS, (4, 2, 1)),
    AnyProcessor("no instructions for bytes", EIGHT_SIGNED_OUTPUTS, (4, 2, 1)),
)
"""From the fastest to the one that every processor has."""


def best_unit() -> int:
    """The index of the fastest unit of this processor."""
    return next(number for number, unit in enumerate(UNITS) if unit.found())
