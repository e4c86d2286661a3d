"""Runs compiled kernels: small ones directly, large ones on several threads. A kernel is a C
function with one argument, a pointer to its arguments (see `sglang_jax.cpu_kernels.work`)."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang_jax.cpu_kernels.compiling import CompiledKernel
from sglang_jax.cpu_kernels.work import ELEMENTS_WORTH_SHARING
from torch_backend.cpu_kernels.threads import OwnThreads

logger = logging.getLogger(__name__)

_Parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


class Launcher:
    """A compiled kernel with room for its arguments; to be used by one thread at a time. `fields`: the dtypes of the
    kernel's arguments, as in `struct`: `q` int64, `d` float64. `threads`: those that share large work; None: those of
    torch's operations."""

    def __init__(self, kernel: CompiledKernel, fields: str, threads: OwnThreads | None = None) -> None:
        layout = struct.Struct("=qqq" + fields)
        self._arguments = ctypes.create_string_buffer(layout.size)
        self._pack = layout.pack_into
        self._pointer = ctypes.addressof(self._arguments)
        self._kernel = kernel
        # Short work keeps the interpreter's lock: getting it back can take longer than the work.
        self._run_holding_lock = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
        self._run_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
        self._threads = threads
        self._parallel = openmp_parallel() if threads is None else None
        self.slots = torch.get_num_threads() if self._parallel is not None else 1
        """Maximum threads that work at once."""
        if threads is not None:
            self.slots = threads.size

    def __call__(self, elements: int, items: int, *fields: int | float) -> None:
        """Returns when all `items` are done; `elements`: approximate number of values that this reads."""
        self._pack(self._arguments, 0, 0, 0, items, *fields)
        if self._threads is not None:
            shared = elements >= ELEMENTS_WORTH_SHARING and items > 1
            self._threads.note(self._kernel.address, self._arguments.raw, shared=shared)
        if elements < ELEMENTS_WORTH_SHARING:
            self._run_holding_lock(self._pointer)
        elif self.slots == 1 or items == 1:
            self._run_alone(self._pointer)
        elif self._threads is not None:
            self._threads(self._kernel.address, self._pointer)
        elif self._parallel is None:
            self._run_alone(self._pointer)
        else:
            self._parallel(self._kernel.address, self._pointer, 0, 0)  # 0: as many threads as torch has by default


@functools.cache
def openmp_parallel() -> Callable[..., Any] | None:
    """`GOMP_parallel` of torch's OpenMP library, which calls a function in each thread of the team. A separate team
    would not do: with more threads than cores, torch's threads sleep between operations. None if torch uses another
    library; kernels then run on one thread, which is logged once."""
    if torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
        try:
            # Found among this library's dependencies.
            function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
        except (OSError, AttributeError) as error:
            logger.info("CPU kernels run on one thread: torch's OpenMP is not available (%s)", error)
            return None
        return _Parallel(ctypes.cast(function, ctypes.c_void_p).value or 0)
    logger.info("CPU kernels run on one thread: this torch was built without OpenMP")
    return None
