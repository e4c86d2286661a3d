"""Entry points of programs: slow imports follow once Ctrl-C is set up to end the process without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as in shells."""


def main(name: str = "sglang-jax") -> None:
    """Entry point of the scripts `sglang-jax` and the one with the distribution's name."""
    with ended_by_interrupts():
        from sglang_jax.cli.main import cli, run
    sys.exit(run(cli, name))


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end the process at once, without closing anything: for imports, and loading a core in a thread, which
    cannot be stopped and leave no partial results. Does nothing if Ctrl-C is ignored (in the background) or handled."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(sys.stderr.fileno(), b"\nInterrupted.\n")
    os._exit(INTERRUPTED)
