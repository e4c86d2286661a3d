"""What every process of an engine, core or rank, does for whoever started it."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys

STACKS_SIGNAL = signal.SIGUSR1
"""Has a process write the Python stacks of all its threads to its standard error."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def write_stacks_on_signal() -> None:
    """Does for this process what `STACKS_SIGNAL` says, also while it is in native code that holds the interpreter's
    lock: the handler is native as well."""
    faulthandler.register(STACKS_SIGNAL)


def die_with_parent() -> None:
    """Has the kernel kill this process once the thread that started it has ended, also while it hangs or is stopped.
    Elsewhere than on Linux nothing is done: it ends once it finds its connection closed, unless it hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
