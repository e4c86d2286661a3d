"""The heap of the tests' processes: a million objects, modules and tests, that every full collection would scan for a
second."""

from __future__ import annotations

import gc

freeze, unfreeze = gc.freeze, gc.unfreeze


def keep_frozen() -> None:
    """Excludes all current objects from garbage collection until the process ends.

    A server or a benchmark that ends in this process would unfreeze them with its own, so `gc.freeze` and `gc.unfreeze`
    do nothing from now on. `freeze` and `unfreeze` of this module still do.
    """
    freeze()
    gc.freeze = gc.unfreeze = _do_nothing


def _do_nothing() -> None:
    pass
