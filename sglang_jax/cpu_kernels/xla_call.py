"""Lets XLA's CPU backend call kernels from its programs. XLA calls a C function with the address of a call frame: see
`xla/ffi/api/c_api.h` in jaxlib. Here numba compiles that function, which reads the frame by the offsets of that header,
and passes the buffers to the kernel. Additional threads are those of XLA's own pool, which also run its other
operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import njit, types

from sglang_jax.cpu_kernels.compiling import CompiledKernel
from sglang_jax.cpu_kernels.language import add, call_address, integers, long_integers
from sglang_jax.cpu_kernels.work import FIRST_FIELD

VERSION = (0, 3)
"""Version of the header with these offsets, in jaxlib 0.10.2; they are the same in 0.4, of jaxlib 0.11.1. XLA asks for
it before the first call, and refuses the function if it does not support it."""

# All offsets are in words of 8 bytes. Of XLA_FFI_CallFrame:
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS, _ATTRIBUTES = 1, 2, 3, 9, 14, 20
# Of XLA_FFI_Buffer:
_DATA, _SIZES = 3, 5
# Of XLA_FFI_Array:
_NUMBERS = 2
# Of XLA_FFI_Api:
_DESTROY_ERROR, _SCHEDULE = 8, 17
# Of XLA_FFI_Extension_Base, and of XLA_FFI_Metadata_Extension, the one of type 1:
_EXTENSION_TYPE, _METADATA, _IS_METADATA = 1, 3, 1

# Words shared by the threads of a call, after the kernel's arguments:
_GATE = 0
"""Number of threads that came to help; at least `_CLOSED` once no more may."""
_FINISHED = 1
"""Number of these threads that are done."""
_HOLDERS = 2
"""Threads that still hold the words, including the one that XLA called: the last frees them."""
_SCHEDULED = 3
"""Arguments of XLA's functions that schedule a task in its pool and that destroy an error."""
_WORDS = _SCHEDULED + 5

_CLOSED = 1 << 32
_SPINS = 200
"""Spins before a waiting thread yields its core."""

_allocate = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_give_up_core = types.ExternalFunction("sched_yield", types.int32())

Fill = Callable[[Any, Any], Any]
"""A function that numba inlines: `fill(words, call)` writes a kernel's arguments (see `work`), which are 0 before, from
the buffers of a call, and returns the number of threads worth using. See `operand`, `result` and `constants`."""

part: Callable[[Any], Any] = njit(inline="always")


def build_xla_call(kernel: CompiledKernel, fields: str, fill: Fill) -> CompiledKernel:
    """Builds the function that XLA calls for a kernel with arguments `fields`, as in `struct`, which `fill` writes.
    Memory that a kernel needs besides is a result that nobody reads. The function is compiled at each start, because it
    contains addresses."""
    kernel_address = kernel.address
    own = FIRST_FIELD + len(fields)
    gate, finished, holders, scheduled = own + _GATE, own + _FINISHED, own + _HOLDERS, own + _SCHEDULED
    count = own + _WORDS

    def help_out(shared):
        words = long_integers(shared)
        if add(words, gate, 1) < _CLOSED:
            call_address(kernel_address, shared)
            add(words, finished, 1)
        if add(words, holders, -1) == 1:
            _free(shared)

    helper = numba.cfunc(types.void(types.int64))(help_out)
    helper_address = helper.address

    def handle(frame):
        call = long_integers(frame)
        extension = call[_EXTENSION]
        if extension != 0 and integers(extension + 8 * _EXTENSION_TYPE)[0] == _IS_METADATA:
            _describe(long_integers(extension)[_METADATA])
            return 0
        shared = _allocate(8 * count)
        words = long_integers(shared)
        for word in range(count):
            words[word] = 0
        threads = fill(words, call)
        words[holders] = threads
        for _ in range(1, threads):
            if not _schedule(shared + 8 * scheduled, call[_API], call[_CONTEXT], helper_address, shared):
                add(words, holders, -1)
        call_address(kernel_address, shared)
        came = add(words, gate, _CLOSED)
        spins = 0
        while add(words, finished, 0) < came:
            spins += 1
            if spins % _SPINS == 0:
                _give_up_core()
        if add(words, holders, -1) == 1:
            _free(shared)
        return 0

    handler = numba.cfunc(types.int64(types.int64))(handle)
    return CompiledKernel(handler.address, (handler, helper, kernel))


@part
def operand(call, index):
    """An operand of a call: see `address` and `size`."""
    return long_integers(long_integers(call[_ARGUMENTS])[index])


@part
def result(call, index):
    """A result of a call: see `address` and `size`."""
    return long_integers(long_integers(call[_RESULTS])[index])


@part
def constants(call):
    """The numbers of the call's only attribute, an array of int64."""
    attribute = long_integers(long_integers(call[_ATTRIBUTES])[0])
    return long_integers(attribute[_NUMBERS])


@part
def address(buffer):
    """The address of a buffer's data."""
    return buffer[_DATA]


@part
def size(buffer, axis):
    """A buffer's size along an axis."""
    return long_integers(buffer[_SIZES])[axis]


@part
def _describe(metadata):
    """Answers XLA's query before the first call: the header's version, and no special properties."""
    words, numbers = long_integers(metadata), integers(metadata)
    words[1] = 24  # bytes of XLA_FFI_Api_Version
    words[2] = 0
    numbers[6], numbers[7] = VERSION
    numbers[8] = 0
    words[5] = 0


@part
def _schedule(own, api, context, task, argument):
    """Schedules a task in XLA's pool; returns False if there is no pool. `own`: the address of words for this."""
    words = long_integers(own)
    words[0] = 40  # bytes of XLA_FFI_ThreadPool_Schedule_Args
    words[1] = 0
    words[2] = context
    words[3] = task
    words[4] = argument
    error = call_address(long_integers(api)[_SCHEDULE], own)
    if error != 0:
        words[0] = 24  # bytes of XLA_FFI_Error_Destroy_Args
        words[2] = error
        call_address(long_integers(api)[_DESTROY_ERROR], own)
    return error == 0
