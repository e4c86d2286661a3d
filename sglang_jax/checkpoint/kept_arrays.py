"""Small arrays that are read once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from sglang_jax.checkpoint.reader import Array

_MOST_KEPT = 1024
"""Scales of the rows of so many matrices have some tens of MiB at most."""


class KeptArrays:
    """The arrays that were last asked for, by name. Any thread may ask; of those that want the same array one reads it
    and the others wait. `read` gives an array that nobody changes."""

    def __init__(self, read: Callable[[str], Array], most: int = _MOST_KEPT) -> None:
        self._read = read
        self._most = most
        self._lock = threading.Lock()
        self._arrays: OrderedDict[str, Future[Array]] = OrderedDict()

    def get(self, name: str) -> Array:
        """The array. Raises what `read` raises, to all who wait for it; who asks later reads again."""
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
