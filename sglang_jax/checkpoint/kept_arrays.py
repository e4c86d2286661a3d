"""A cache of small arrays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from sglang_jax.checkpoint.reader import Array

_MAX_KEPT = 1024
"""The row scales of this many matrices have some tens of MiB at most."""


class KeptArrays:
    """An LRU cache of `read`, whose arrays must not be changed. Thread-safe; if several threads want the same array,
    one reads it and the others wait."""

    def __init__(self, read: Callable[[str], Array], most: int = _MAX_KEPT) -> None:
        self._read = read
        self._most = most
        self._lock = threading.Lock()
        self._arrays: OrderedDict[str, Future[Array]] = OrderedDict()

    def get(self, name: str) -> Array:
        """Returns the array. An exception of `read` goes to all waiting threads, and is not cached."""
        with self._lock:
            wanted = self._arrays.get(name)
            first = wanted is None
            if wanted is None:
                wanted = self._arrays[name] = Future()
                if len(self._arrays) > self._most:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(name)
        if first:
            self._fill(name, wanted)
        return wanted.result()

    def _fill(self, name: str, wanted: Future[Array]) -> None:
        try:
            wanted.set_result(self._read(name))
        except BaseException as error:
            with self._lock:
                if self._arrays.get(name) is wanted:
                    del self._arrays[name]
            wanted.set_exception(error)
