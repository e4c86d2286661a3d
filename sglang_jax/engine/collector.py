"""Settings of Python's garbage collector while a model is loaded, and in long-running processes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARE_THRESHOLDS = (100_000, 20, 100)
"""Thresholds (see `gc.set_threshold`): the first counts objects created and not yet freed."""

_lock = threading.Lock()
_open = 0
_before = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Makes the collector run a hundred times less often, in the whole process, while a model is loaded.

    That creates millions of objects that stay. With the default thresholds the collector scans all of them hundreds of
    times, a tenth of the loading time of a small model. It is not turned off, because tracing leaves garbage behind; if
    the caller turned it off, it stays off. Uses may overlap: the last one to end restores the thresholds.
    """
    global _open, _before
    with _lock:
        _open += 1
        if _open == 1:
            _before = gc.get_threshold()
            if _before[0] != 0:
                gc.set_threshold(*RARE_THRESHOLDS)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0 and gc.get_threshold() == RARE_THRESHOLDS:
                gc.set_threshold(*_before)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Excludes all current objects from garbage collection, in a process that has loaded everything it keeps. A full
    collection of 600,000 objects, in a server mostly modules, classes and vocabularies, takes 80 ms, during which no
    request is answered and no step is planned."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
