"""Python's garbage collector: while a model is loaded, for commands that serve one request at a time, and in processes
that serve for long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (100_000, 20, 100)
"""Thresholds (see `gc.set_threshold`): the first is of objects made and not yet freed."""

_lock = threading.Lock()
_open = 0
_before = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """The collector looks for garbage a hundred times less often, in the whole process.

    Loading a model makes some millions of objects that stay: modules, classes, programs. By its usual thresholds the
    collector goes through what there is hundreds of times, for a tenth of the time that a small model takes to load.
    It is not turned off, since tracing leaves garbage behind. Where somebody turned it off, it stays off. Several may
    be open at once: the usual thresholds come back with the last one.
    """
    global _open, _before
    with _lock:
        _open += 1
        if _open == 1:
            _before = gc.get_threshold()
            if _before[0] != 0:
                gc.set_threshold(*RARE)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0 and gc.get_threshold() == RARE:
                gc.set_threshold(*_before)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The collector does not look at the objects that there are now, in the whole process: for a process of our own,
    when it has loaded what it keeps.

    A full collection goes through all objects, and in a server nearly all are modules, classes and vocabularies. It
    takes 80 ms where there are 600,000, in which no request is answered and no step is planned.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
