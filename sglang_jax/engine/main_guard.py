"""Checks that a spawned process can run the main script once more: `multiprocessing` runs the parent's main module in
it, as `__mp_main__`. If that creates an engine with processes, each creates further ones, without end."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from sglang_jax.errors import ConfigError

CORE_NAME = "sglang-jax-core"
# Exit status of a core whose script has no guard. Other failures give 1, or a signal.
UNGUARDED_STATUS = 78

UNGUARDED = (
    "this script needs a guard: an engine in a process of its own (dp_size above 1, for one) runs the script once more "
    'in that process, where it must not create the engine again. Put what creates it under\n\nif __name__ == "__main__"'
    ":\n    with Engine(dp_size=2, ...) as engine:\n        ..."
)
NO_FILE = (
    "an engine in a process of its own (dp_size above 1, for one) runs the script once more in that process, and this "
    "one has no file ({}): write it to a file, or use one engine in this process"
)


def check_main() -> None:
    """Checks the main script before an engine starts a process. Raises `ConfigError` if it cannot be run once more, or
    is being run for that just now. In an engine's process, exits instead; the parent reports the error."""
    main = sys.modules["__main__"]
    if _runs_once_more():
        if multiprocessing.current_process().name == CORE_NAME:
            os._exit(UNGUARDED_STATUS)  # works on any thread; there is nothing to save
        raise ConfigError(UNGUARDED)
    path = getattr(main, "__file__", None)
    if path is not None and getattr(main, "__spec__", None) is None and not Path(path).exists():
        raise ConfigError(NO_FILE.format(path))


def _runs_once_more() -> bool:
    """Whether this process is still being set up. Afterwards, `__mp_main__` is the main module."""
    again = sys.modules.get("__mp_main__")
    return again is not None and again.__name__ == "__mp_main__" and again is not sys.modules["__main__"]
