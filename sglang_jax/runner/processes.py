"""Set-up of every process of an engine, core or rank."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys

STACKS_SIGNAL = signal.SIGUSR1
"""The signal on which a process writes the Python stacks of all its threads to its standard error."""

_PR_SET_PDEATHSIG = 1  # prctl(2)


def write_stacks_on_signal() -> None:
    """Installs the handler of `STACKS_SIGNAL`, which is native, so it works while native code holds the interpreter's
    lock."""
    faulthandler.register(STACKS_SIGNAL)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends, even if this process hangs or is
    stopped. On systems other than Linux, the process ends when it finds its connection closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
