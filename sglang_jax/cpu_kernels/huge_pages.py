"""Memory in huge pages, for matrices and for keys and values. One row times a matrix reads it at 9 to 15 GB/s from
pages of 4 KiB, and at 15 to 22 from pages of 2 MiB (one core, Zen 4).

Linux gives huge pages only to memory that asks for them, and only whole ones. So small arrays share mappings.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading

import numpy as np
from numpy.typing import DTypeLike

from sglang_jax.checkpoint.reader import Array

_PAGE = 2**21
_SHARED_BYTES = 8 * _PAGE
_ALIGNMENT = 64
"""A line of the cache, and what XLA needs to use an array in place."""


class HugePages:
    """Gives out arrays from mappings, which are freed when all arrays of theirs are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: Array = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array of zeros."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes >= _SHARED_BYTES // 2:
            return _mapped(nbytes)[:nbytes].view(dtype).reshape(shape)
        with self._lock:
            if len(self._left) < nbytes:
                self._left = _mapped(_SHARED_BYTES)
            own = self._left[:nbytes]
            self._left = self._left[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return own.view(dtype).reshape(shape)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Asks for huge pages in memory that was not written yet. They are a hint: a system may have none."""
    if sys.platform.startswith("linux"):
        first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + nbytes
        size = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size >= _PAGE:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _mapped(nbytes: int) -> Array:
    """At least `nbytes` at the start of a huge page."""
    size = -(-nbytes // _PAGE) * _PAGE
    mapping = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, np.uint8)
    ask_for_huge_pages(whole.ctypes.data, whole.nbytes)
    first = -whole.ctypes.data % _PAGE
    found: Array = whole[first : first + size]
    return found


huge_pages = HugePages()
