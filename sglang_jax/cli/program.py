"""Where programs begin. What takes a second to import is imported here, once Ctrl-C ends the process without a trace of
it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""


def main(name: str = "sglang-jax") -> None:
    """Entry point of the scripts `sglang-jax` and that with the distribution's name."""
    with ended_by_interrupts():
        from sglang_jax.cli.main import cli, run
    sys.exit(run(cli, name))


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process at once, with nothing closed. For what cannot be told to stop, and leaves nothing half
    done that somebody would find: imports, and a core that loads in a thread, whose other processes end with this one.
    Changes nothing where Ctrl-C does something else: in the background, or where somebody handles it."""
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
