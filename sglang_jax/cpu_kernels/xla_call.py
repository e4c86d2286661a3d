"""Lets XLA's CPU backend call kernels from its programs. XLA calls a C function with the address of a call frame: see
`xla/ffi/api/c_api.h` in jaxlib. Here numba compiles that function, which reads the frame by the offsets of that header,
and passes the buffers to the kernel. Additional threads are those of XLA's own pool, which also run its other
operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler, name_function
from sglang_jax.cpu_kernels.language import add, address_of, call_address, integers, long_integers
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

# Words shared by the threads of a call, before the kernel's arguments:
_KERNEL = 0
"""Address of the kernel."""
_GATE = 1
"""Number of threads that came to help; at least `_CLOSED` once no more may."""
_FINISHED = 2
"""Number of these threads that are done."""
_HOLDERS = 3
"""Threads that still hold the words, including the one that XLA called: the last frees them."""
_SCHEDULED = 4
"""Arguments of XLA's functions that schedule a task in its pool and that destroy an error."""
_WORDS = _SCHEDULED + 5

_HELPER = "sglang_jax_cpu_kernels_help_out"

_CLOSED = 1 << 32
_SPINS = 200
"""Spins before a waiting thread yields its core."""

_allocate = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_give_up_core = types.ExternalFunction("sched_yield", types.int32())

part: Callable[[Any], Any] = njit(inline="always")


def build_xla_call(compiler: KernelCompiler, name: str, kernel: CompiledKernel, handle: Any) -> CompiledKernel:
    """Builds the function that XLA calls for a kernel. `name`: unique in this process, and the same in all, so that
    machine code is found in the compiler's cache. `handle(frame)` is a function of this form:

        def handle(frame):
            call = long_integers(frame)
            if answered(call):
                return 0
            shared = begin(fields)  # the number of the kernel's arguments
            threads = _fill(arguments(shared), call)
            return run(call, shared, threads, address_of(name))

    where `_fill` writes the kernel's arguments (see `work`), which are 0 before, from the buffers of the call (see
    `operand`, `result` and `constants`), and returns the number of threads worth using. Memory that a kernel needs
    besides is a result that nobody reads."""
    helper = compiler(_help_out, types.void(types.int64))
    name_function(_HELPER, helper.address)
    name_function(name, kernel.address)
    handler = compiler(handle, types.int64(types.int64))
    return CompiledKernel(handler.address, (handler, helper, kernel))


def _help_out(shared):
    """What a thread of XLA's pool does."""
    words = long_integers(shared)
    if add(words, _GATE, 1) < _CLOSED:
        call_address(words[_KERNEL], shared + 8 * _WORDS)
        add(words, _FINISHED, 1)
    if add(words, _HOLDERS, -1) == 1:
        _free(shared)


@part
def answered(call):
    """Whether the call is XLA's query before the first one, which is answered here: the header's version, and no
    special properties."""
    extension = call[_EXTENSION]
    query = extension != 0 and integers(extension + 8 * _EXTENSION_TYPE)[0] == _IS_METADATA
    if query:
        metadata = long_integers(extension)[_METADATA]
        words, numbers = long_integers(metadata), integers(metadata)
        words[1] = 24  # bytes of XLA_FFI_Api_Version
        words[2] = 0
        numbers[6], numbers[7] = VERSION
        numbers[8] = 0
        words[5] = 0
    return query


@part
def begin(fields):
    """The address of words for a call of a kernel with this number of arguments, all 0."""
    shared = _allocate(8 * (_WORDS + FIRST_FIELD + fields))
    words = long_integers(shared)
    for word in range(_WORDS + FIRST_FIELD + fields):
        words[word] = 0
    return shared


@part
def arguments(shared):
    """The kernel's own words."""
    return long_integers(shared + 8 * _WORDS)


@part
def run(call, shared, threads, kernel):
    """Runs the kernel at an address on a number of threads, and frees the words. Returns 0, for success."""
    words = long_integers(shared)
    words[_KERNEL] = kernel
    words[_HOLDERS] = threads
    for _ in range(1, threads):
        if not _schedule(call, shared):
            add(words, _HOLDERS, -1)
    call_address(kernel, shared + 8 * _WORDS)
    came = add(words, _GATE, _CLOSED)
    spins = 0
    while add(words, _FINISHED, 0) < came:
        spins += 1
        if spins % _SPINS == 0:
            _give_up_core()
    if add(words, _HOLDERS, -1) == 1:
        _free(shared)
    return 0


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
def _schedule(call, shared):
    """Schedules a thread of XLA's pool to help; returns False if there is no pool."""
    api, place = long_integers(call[_API]), shared + 8 * _SCHEDULED
    words = long_integers(place)
    words[0] = 40  # bytes of XLA_FFI_ThreadPool_Schedule_Args
    words[1] = 0
    words[2] = call[_CONTEXT]
    words[3] = address_of(_HELPER)
    words[4] = shared
    error = call_address(api[_SCHEDULE], place)
    if error != 0:
        words[0] = 24  # bytes of XLA_FFI_Error_Destroy_Args
        words[2] = error
        call_address(api[_DESTROY_ERROR], place)
    return error == 0
