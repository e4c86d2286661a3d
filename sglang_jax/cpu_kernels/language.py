"""Additions to numba's Python for CPU kernels: raw memory, bfloat16, a vectorised exponential, and shared counters.
Each is a few instructions that LLVM inlines. Numba has no bfloat16; a pointer to uint16 points to bfloat16 bits."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

INT8_BYTES, BFLOAT16_BYTES, FLOAT32_BYTES = 1, 2, 4

_CACHE_LINE = 64

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_POINTEES = {types.int8: _I8, types.uint16: _I16, types.int32: _I32, types.int64: _I64, types.float32: _F32}


def _pointer_to(pointee: types.Type, *arguments: types.Type):
    def generate(context, builder, signature, values):
        return builder.inttoptr(values[0], _POINTEES[pointee].as_pointer())

    return types.CPointer(pointee)(types.int64, *arguments), generate


@intrinsic(prefer_literal=True)
def elements(typing, address, width):
    """A pointer to the elements at `address`: int8 if `width`, a constant, is 1 byte, bfloat16 if it is 2, float32 if
    it is 4."""
    if not isinstance(width, types.IntegerLiteral):
        return None
    kinds = {INT8_BYTES: types.int8, BFLOAT16_BYTES: types.uint16, FLOAT32_BYTES: types.float32}
    pointee = kinds[width.literal_value]
    return _pointer_to(pointee, width)


@intrinsic
def floats(typing, address):
    """A pointer to float32."""
    return _pointer_to(types.float32)


@intrinsic
def integers(typing, address):
    """A pointer to int32."""
    return _pointer_to(types.int32)


@intrinsic
def long_integers(typing, address):
    """A pointer to int64."""
    return _pointer_to(types.int64)


@intrinsic
def load(typing, pointer, index):
    """The element at `index`: float32 for int8, bfloat16 and float32, int64 for other integers."""
    pointee = pointer.dtype
    result = types.int64 if pointee in (types.int32, types.int64) else types.float32

    def generate(context, builder, signature, values):
        found = builder.load(builder.gep(values[0], [values[1]]))
        if pointee == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(found, _I32), _I32(16)), _F32)
        if pointee == types.int8:
            return builder.sitofp(found, _F32)
        return builder.sext(found, _I64) if pointee == types.int32 else found

    return result(pointer, types.int64), generate


@intrinsic
def store(typing, pointer, index, value):
    """Writes a float32, rounded to the nearest for bfloat16, ties to even."""
    pointee = pointer.dtype

    def generate(context, builder, signature, values):
        where = builder.gep(values[0], [values[1]])
        builder.store(_to_bfloat16(builder, values[2]) if pointee == types.uint16 else values[2], where)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


def _to_bfloat16(builder, value):
    bits = builder.bitcast(value, _I32)
    upper = builder.lshr(bits, _I32(16))
    half = builder.add(_I32(0x7FFF), builder.and_(upper, _I32(1)))
    rounded = builder.lshr(builder.add(bits, half), _I32(16))
    # The carry would turn some NaNs into numbers.
    is_nan = builder.icmp_unsigned(">", builder.and_(bits, _I32(0x7FFFFFFF)), _I32(0x7F800000))
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)


@intrinsic
def exponential(typing, x):
    """e^x of a float32 to about one unit in the last place; beyond ±87 that of ±87, for NaN NaN.

    After Cody and Waite (1980): x is a multiple of ln 2 plus a remainder of at most half of it, whose power is a
    polynomial with the coefficients of Cephes (Moshier 1989). Numba lets LLVM reorder sums and products in all kernels,
    but not fused operations.
    """

    def generate(context, builder, signature, values):
        (x,) = values
        for comparison, limit in (("<", -87.0), (">", 87.0)):
            x = builder.select(builder.fcmp_ordered(comparison, x, _F32(limit)), _F32(limit), x)
        whole = builder.call(builder.module.declare_intrinsic("llvm.rint", [_F32]), [builder.fmul(x, _F32(_LOG2_E))])
        rest = builder.fma(whole, _F32(-_LN_2_HIGH), x)
        rest = builder.fma(whole, _F32(-_LN_2_LOW), rest)
        power = _F32(_EXPONENTIAL[0])
        for coefficient in _EXPONENTIAL[1:]:
            power = builder.fma(power, rest, _F32(coefficient))
        is_number = builder.fcmp_ordered("ord", x, x)
        exponent = builder.fptosi(builder.select(is_number, whole, _F32(0.0)), _I32)
        scale = builder.bitcast(builder.shl(builder.add(exponent, _I32(127)), _I32(23)), _F32)
        return builder.fmul(power, scale)

    return types.float32(types.float32), generate


_LOG2_E = 1.44269502162933349609375
_LN_2_HIGH, _LN_2_LOW = 0.693359375, -2.12194441724568605423e-4
_EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0)


@intrinsic
def hyperbolic_tangent(typing, x):
    """tanh of a float32 to about two units in the last place, for NaN NaN: the quotient of two polynomials with Eigen's
    coefficients (Guennebaud, Jacob et al.), of numbers up to a limit. A library's function takes one value at a time.
    """

    def generate(context, builder, signature, values):
        (x,) = values
        for comparison, limit in (("<", -_TANH_LIMIT), (">", _TANH_LIMIT)):
            x = builder.select(builder.fcmp_ordered(comparison, x, _F32(limit)), _F32(limit), x)
        square = builder.fmul(x, x)
        above, below = (_F32(coefficients[0]) for coefficients in (_TANH_ABOVE, _TANH_BELOW))
        for coefficient in _TANH_ABOVE[1:]:
            above = builder.fma(above, square, _F32(coefficient))
        for coefficient in _TANH_BELOW[1:]:
            below = builder.fma(below, square, _F32(coefficient))
        return builder.fdiv(builder.fmul(x, above), below)

    return types.float32(types.float32), generate


_TANH_LIMIT = 7.90531110763549805
_TANH_ABOVE = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


@intrinsic
def float_field(typing, work, index):
    """The word `index` of a kernel's arguments, a float64, as float32."""

    def generate(context, builder, signature, values):
        word = builder.load(builder.gep(values[0], [values[1]]))
        return builder.fptrunc(builder.bitcast(word, _F64), _F32)

    return types.float32(work, types.int64), generate


@intrinsic
def take(typing, work, index):
    """Increments the word `index` of a kernel's arguments atomically; returns its previous value."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), _I64(1), "monotonic")

    return types.int64(work, types.int64), generate


@intrinsic
def add(typing, work, index, value):
    """Adds `value` to the word `index` atomically, in one order for all threads; returns its previous value."""

    def generate(context, builder, signature, values):
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), values[2], "seq_cst")

    return types.int64(work, types.int64, types.int64), generate


@intrinsic
def call_address(typing, function, argument):
    """Calls the C function at an address with one word; returns its result, undefined for void functions."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(_I64, [_I64]).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), [values[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def address_of(typing, name):
    """The address of the C function of one word with a constant name: see `compiling.name_function`."""
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context, builder, signature, values):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I64, [_I64]), name.literal_value)
        return builder.ptrtoint(function, _I64)

    return types.int64(name), generate


@intrinsic(prefer_literal=True)
def prefetch(typing, address, count):
    """Starts to read `count` bytes, a constant, at `address`, which may be any."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for line in range(0, count.literal_value, _CACHE_LINE):
            where = builder.inttoptr(builder.add(values[0], _I64(line)), pointer)
            builder.call(function, [where, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64, count), generate
