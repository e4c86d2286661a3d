"""Lets XLA's CPU backend call the kernel of products with matrices in blocks from its programs. XLA calls a C function
with the address of a call frame: see `xla/ffi/api/c_api.h` in jaxlib. Here numba compiles that function, which reads
the frame by the offsets of that header, and passes the buffers to the kernel. Additional threads are those of XLA's own
pool, which also run its other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sglang_jax.cpu_kernels.block_layout import EXACT, LARGEST, OUTPUTS, BlockForm
from sglang_jax.cpu_kernels.compiling import CompiledKernel
from sglang_jax.cpu_kernels.language import add, integers, long_integers
from sglang_jax.cpu_kernels.work import ELEMENTS_WORTH_SHARING, FIRST_FIELD, ITEMS

VERSION = (0, 3)
"""Version of the header with these offsets, in jaxlib 0.10.2; they are the same in 0.4, of jaxlib 0.11.1. XLA asks for
it before the first call, and refuses the function if it does not support it."""

# All offsets are in words of 8 bytes. Of XLA_FFI_CallFrame:
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 1, 2, 3, 9, 14
# Of XLA_FFI_Buffer:
_DATA, _SIZES = 3, 5
# Of XLA_FFI_Api:
_DESTROY_ERROR, _SCHEDULE = 8, 17
# Of XLA_FFI_Extension_Base, and of XLA_FFI_Metadata_Extension, the one of type 1:
_EXTENSION_TYPE, _METADATA, _IS_METADATA = 1, 3, 1

# Words shared by the threads of a call: the kernel's arguments, and then:
_GATE = FIRST_FIELD + 11
"""Number of threads that came to help; at least `_CLOSED` once no more may."""
_FINISHED = _GATE + 1
"""Number of these threads that are done."""
_HOLDERS = _FINISHED + 1
"""Threads that still hold the words, including the one that XLA called: the last frees them."""
_SCHEDULED = _HOLDERS + 1
"""Arguments of XLA's functions that schedule a task in its pool and that destroy an error."""
_WORDS = _SCHEDULED + 5

_CLOSED = 1 << 32
_SPINS = 200
"""Spins before a waiting thread yields its core."""

_allocate = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_give_up_core = types.ExternalFunction("sched_yield", types.int32())

_part: Callable[[Any], Any] = njit(inline="always")
_I64 = ir.IntType(64)


@intrinsic
def _call(typing, function, argument):
    """Calls the C function at an address with one word; returns its result, undefined for void functions."""

    def generate(context, builder, signature, values):
        kind = ir.FunctionType(_I64, [_I64]).as_pointer()
        return builder.call(builder.inttoptr(values[0], kind), [values[1]])

    return types.int64(types.int64, types.int64), generate


def build_xla_call(kernel: CompiledKernel, bits: int, form: BlockForm = EXACT) -> CompiledKernel:
    """Builds the function that XLA calls for a kernel of a form without gate, for values of `bits` bits.
    It is compiled at each start, because it contains addresses. Operands: `x [rows, inputs]`, quantised values, scales.
    Results: the kernel's output, `[rows, outputs]`, and scratch `[threads, floats]` (see `block_layout`)."""
    address, outputs_of_item = kernel.address, form.outputs * form.tiles
    levels_read = 16 // OUTPUTS if bits == 4 else 1
    """Weights per element of the quantised values."""

    def help_out(shared):
        words = long_integers(shared)
        if add(words, _GATE, 1) < _CLOSED:
            _call(address, shared)
            add(words, _FINISHED, 1)
        if add(words, _HOLDERS, -1) == 1:
            _free(shared)

    helper = numba.cfunc(types.void(types.int64))(help_out)
    helper_address = helper.address

    def handle(frame):
        call = long_integers(frame)
        extension = call[_EXTENSION]
        if extension != 0 and integers(extension + 8 * _EXTENSION_TYPE)[0] == _IS_METADATA:
            _describe(long_integers(extension)[_METADATA])
            return 0
        shared = _allocate(8 * _WORDS)
        words = long_integers(shared)
        threads = _fill(
            words, long_integers(call[_ARGUMENTS]), long_integers(call[_RESULTS]), levels_read, outputs_of_item
        )
        words[_HOLDERS] = threads
        for _ in range(1, threads):
            if not _scheduled(words, call[_API], call[_CONTEXT], helper_address, shared):
                add(words, _HOLDERS, -1)
        _call(address, shared)
        came = add(words, _GATE, _CLOSED)
        spins = 0
        while add(words, _FINISHED, 0) < came:
            spins += 1
            if spins % _SPINS == 0:
                _give_up_core()
        if add(words, _HOLDERS, -1) == 1:
            _free(shared)
        return 0

    handler = numba.cfunc(types.int64(types.int64))(handle)
    return CompiledKernel(handler.address, (handler, helper, kernel))


@_part
def _describe(metadata):
    """Answers XLA's query before the first call: the header's version, and no special properties."""
    words, numbers = long_integers(metadata), integers(metadata)
    words[1] = 24  # bytes of XLA_FFI_Api_Version
    words[2] = 0
    numbers[6], numbers[7] = VERSION
    numbers[8] = 0
    words[5] = 0


@_part
def _fill(words, arguments, results, levels_read, outputs_of_item):
    """Writes the kernel's arguments; returns the number of threads worth using."""
    x, output, scratch = long_integers(arguments[0]), long_integers(results[0]), long_integers(results[1])
    rows, inputs = long_integers(x[_SIZES])[0], long_integers(x[_SIZES])[1]
    outputs, slots = long_integers(output[_SIZES])[1], long_integers(scratch[_SIZES])[0]
    items = (outputs + outputs_of_item - 1) // outputs_of_item * ((rows + LARGEST - 1) // LARGEST)
    for word in range(_SCHEDULED):
        words[word] = 0
    words[ITEMS] = items
    words[FIRST_FIELD] = x[_DATA]
    words[FIRST_FIELD + 1] = long_integers(arguments[1])[_DATA]
    words[FIRST_FIELD + 2] = long_integers(arguments[2])[_DATA]
    words[FIRST_FIELD + 4] = output[_DATA]
    words[FIRST_FIELD + 5] = scratch[_DATA]
    words[FIRST_FIELD + 6] = slots
    words[FIRST_FIELD + 7] = rows
    words[FIRST_FIELD + 8] = outputs
    words[FIRST_FIELD + 9] = inputs
    return min(slots, items) if rows * outputs * inputs // levels_read >= ELEMENTS_WORTH_SHARING else 1


@_part
def _scheduled(words, api, context, task, argument):
    """Schedules a task in XLA's pool; returns False if there is no pool."""
    words[_SCHEDULED] = 40  # bytes of XLA_FFI_ThreadPool_Schedule_Args
    words[_SCHEDULED + 1] = 0
    words[_SCHEDULED + 2] = context
    words[_SCHEDULED + 3] = task
    words[_SCHEDULED + 4] = argument
    error = _call(long_integers(api)[_SCHEDULE], argument + 8 * _SCHEDULED)
    if error != 0:
        words[_SCHEDULED] = 24  # bytes of XLA_FFI_Error_Destroy_Args
        words[_SCHEDULED + 2] = error
        _call(long_integers(api)[_DESTROY_ERROR], argument + 8 * _SCHEDULED)
    return error == 0
