"""Threads for kernels, apart from those of torch's own operations.

A kernel's items are taken one by one (see `sglang_jax.cpu_kernels.work`), so the caller needs no thread to come: it
computes, and waits only for threads that did. With OpenMP, each call waits for all threads, also for one that has no
core because other processes are busy.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import add, call_address, long_integers
from sglang_jax.cpu_kernels.work import ITEM_COUNTER, SLOT_COUNTER

# Words shared by the threads:
_CALLS = 0
"""Number of calls so far; one more starts the work."""
_GATE = 1
"""Threads that came to help with this call; at least `_CLOSED` once no more may."""
_FINISHED = 2
"""Threads that came and are done."""
_SLEEPING = 3
_KERNEL, _ARGUMENTS = 4, 5
_LOCK, _CONDITION = 6, 7
"""Addresses of a mutex and a condition variable."""
_STOPPED = 8
_WORDS = 9

_CLOSED = 1 << 32
_SPINS = 50_000
"""Reads before a thread without work sleeps, about a tenth of a millisecond: longer than the time between two kernels
of a step."""
_SPINS_WITH_CORE = 200
"""Reads before the caller, if it waits for another thread, yields its core."""
_BYTES_OF_PTHREAD = 256
"""More than a mutex or a condition variable has on any platform."""

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_wake_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))
_give_up_core = types.ExternalFunction("sched_yield", types.int32())

_part: Callable[[Any], Any] = njit(inline="always")


@intrinsic
def _read(typing, words, index):
    """The word `index`, as other threads wrote it last."""

    def generate(context, builder, signature, values):
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "acquire", 8)

    return types.int64(words, types.int64), generate


@intrinsic
def _write(typing, words, index, value):
    def generate(context, builder, signature, values):
        builder.store_atomic(values[2], builder.gep(values[0], [values[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), generate


def _help(words):
    """What a thread does until the team stops."""
    seen = 0
    while True:
        spins = 0
        while _read(words, _CALLS) == seen and _read(words, _STOPPED) == 0:
            spins += 1
            if spins > _SPINS:
                _lock(words[_LOCK])
                add(words, _SLEEPING, 1)
                while add(words, _CALLS, 0) == seen and _read(words, _STOPPED) == 0:
                    _wait(words[_CONDITION], words[_LOCK])
                add(words, _SLEEPING, -1)
                _unlock(words[_LOCK])
        if _read(words, _STOPPED) != 0:
            return
        seen = _read(words, _CALLS)
        if add(words, _GATE, 1) < _CLOSED:
            call_address(_read(words, _KERNEL), _read(words, _ARGUMENTS))
            add(words, _FINISHED, 1)


def _run(words):
    """What the caller does with the kernel and arguments in `words`."""
    _launch(words)


def _run_all(program):
    """Runs a list of calls: `program` has the address of `words`, the number of calls, and for each of them the
    addresses of kernel and arguments, and whether threads share it."""
    words = long_integers(program[0])
    for number in range(program[1]):
        call = 2 + 3 * number
        arguments = long_integers(program[call + 1])
        _write(arguments, SLOT_COUNTER, 0)
        _write(arguments, ITEM_COUNTER, 0)
        if program[call + 2] != 0:
            _write(words, _KERNEL, program[call])
            _write(words, _ARGUMENTS, program[call + 1])
            _launch(words)
        else:
            call_address(program[call], program[call + 1])


@_part
def _launch(words):
    _write(words, _FINISHED, 0)
    _write(words, _GATE, 0)
    _wake(words)
    call_address(words[_KERNEL], words[_ARGUMENTS])
    came = add(words, _GATE, _CLOSED)
    spins = 0
    while _read(words, _FINISHED) < came:
        spins += 1
        if spins % _SPINS_WITH_CORE == 0:
            _give_up_core()


def _stop(words):
    _write(words, _STOPPED, 1)
    _wake(words)


@_part
def _wake(words):
    add(words, _CALLS, 1)
    if add(words, _SLEEPING, 0) > 0:
        _lock(words[_LOCK])
        _wake_all(words[_CONDITION])
        _unlock(words[_LOCK])


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of the kernel at an address: its arguments (see `work`), and whether all threads shared it."""

    kernel: int
    arguments: bytes
    shared: bool


class OwnThreads:
    """`size` threads, with the caller, that run a kernel; to be used by one thread at a time. They end with it."""

    def __init__(self, compiler: KernelCompiler, size: int) -> None:
        self.size = size
        self._words = np.zeros(_WORDS, np.int64)
        # The first call starts when the gate opens.
        self._words[_GATE] = _CLOSED
        memory = np.zeros(2 * _BYTES_OF_PTHREAD, np.uint8)
        library = ctypes.CDLL(None)
        for number, (word, prepare) in enumerate(
            ((_LOCK, library.pthread_mutex_init), (_CONDITION, library.pthread_cond_init))
        ):
            address = memory.ctypes.data + number * _BYTES_OF_PTHREAD
            self._words[word] = address
            prepare(ctypes.c_void_p(address), None)
        run, run_all, helping, stop = (compiler(each) for each in (_run, _run_all, _help, _stop))
        self._run_all = _function(run_all)
        self._pointer = self._words.ctypes.data
        self._run = _function(run)
        for _ in range(size - 1):
            kept = (self._words, memory, helping)
            threading.Thread(target=_serve, args=(kept, self._pointer), daemon=True).start()
        self._ends = weakref.finalize(self, _end, (self._words, memory, stop), self._pointer)
        self._owners = run, run_all
        self._calls: list[RecordedCall] | None = None

    def __call__(self, kernel: int, arguments: int) -> None:
        """Runs the kernel at an address with the arguments at another one; returns when all items are done."""
        self._words[_KERNEL], self._words[_ARGUMENTS] = kernel, arguments
        self._run(self._pointer)

    @contextmanager
    def recorded(self) -> Iterator[list[RecordedCall]]:
        """The calls of kernels that are made within this context are added to the list."""
        self._calls = []
        try:
            yield self._calls
        finally:
            self._calls = None

    def note(self, kernel: int, arguments: bytes, *, shared: bool) -> None:
        """A launcher notes each call here, with its arguments; `shared`: by all threads."""
        if self._calls is not None:
            self._calls.append(RecordedCall(kernel, arguments, shared))

    def program(self, calls: Sequence[RecordedCall]) -> Callable[[], None]:
        """A function that makes recorded calls again, in their order."""
        words = np.zeros(2 + 3 * len(calls), np.int64)
        words[0], words[1] = self._pointer, len(calls)
        arguments = [ctypes.create_string_buffer(call.arguments, len(call.arguments)) for call in calls]
        for number, (call, own) in enumerate(zip(calls, arguments, strict=True)):
            words[2 + 3 * number :][:3] = call.kernel, ctypes.addressof(own), call.shared
        address = words.ctypes.data

        def run() -> None:
            assert len(words) == 2 + 3 * len(arguments)  # both stay alive with this function
            self._run_all(address)

        return run


def _function(kernel: CompiledKernel) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)


def _serve(kept: tuple[Any, Any, CompiledKernel], pointer: int) -> None:
    """`kept`: memory that a thread reads, which lives as long as the thread."""
    _function(kept[-1])(pointer)


def _end(kept: tuple[Any, Any, CompiledKernel], pointer: int) -> None:
    _function(kept[-1])(pointer)
