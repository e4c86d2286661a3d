"""Vectors in kernels: shared generators of LLVM code, and the instructions for bfloat16."""

from __future__ import annotations

from llvmlite import ir
from numba import config
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

NEEDED = ("avx512bw", "avx512bf16")
"""Required features of the processor, by LLVM's names."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
FLOATS, WORDS, DOUBLE_WORDS = ir.VectorType(F32, 16), ir.VectorType(I16, 32), ir.VectorType(I32, 16)
BFLOATS = ir.VectorType(_BFloat(), 32)


def supported(wanted: tuple[str, ...] = NEEDED) -> bool:
    """Whether the processor has the instructions `wanted`, without which LLVM would end the process."""
    named: str | None = config.CPU_FEATURES
    features = get_host_cpu_features() if named is None else named
    return all(f"+{needed}" in features.split(",") for needed in wanted)


def round_to_bfloat16(builder, low, high):
    """Sixteen float32 and sixteen more as words of bfloat16, rounded to the nearest, ties to even."""
    function = llvm_function(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, [FLOATS, FLOATS])
    return builder.bitcast(builder.call(function, [high, low]), WORDS)


def add_products(builder, total, weights, activations):
    """Adds to each float32 of `total` the products of two adjacent values."""
    function = llvm_function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, BFLOATS, BFLOATS])
    pairs = [builder.bitcast(each, BFLOATS) for each in (weights, activations)]
    return builder.call(function, [total, *pairs])


def lanes(builder, vector, numbers, other=None):
    mask = ir.Constant(ir.VectorType(I32, len(numbers)), list(numbers))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, mask)


def splat(builder, value):
    return in_all_lanes(builder, value, 16)


def in_all_lanes(builder, value, count):
    """A vector of `count` lanes with a value in each."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, I32(0))
    return lanes(builder, one, [0] * count)


def load_vector(builder, kind, address):
    """Loads a vector from an address of any alignment."""
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 1 if isinstance(kind, ir.VectorType) else None
    return found


def store_vector(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def llvm_function(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
