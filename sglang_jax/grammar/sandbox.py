"""Looks at grammars of strangers in a process of its own, before the engine does.

A grammar may be a bomb: take minutes, gigabytes, or more of the stack than there is, which ends a process. Here that
ends a process that has nothing else to lose. What comes back is the grammar in llguidance's own dialect, tried out, so
that the engine's threads spend next to nothing on it in Python.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.runner.processes import die_with_parent
from sglang_jax.sampling.grammar import Grammar

MOST_BYTES = 2 << 30
"""Address space of the process."""

START_SECONDS = 60.0
"""How long the process may take to start, on a machine that is busy; what a grammar may take counts from then."""

PATIENCE_SECONDS = 60.0
"""How long a grammar may take by the clock, on a machine that is busy with others."""

STACK_BYTES = 8 << 20
"""Its stack. Whoever builds the same grammar elsewhere has more, so that what went well here goes well there."""


_READY = b"ready"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a grammar: its text in Lark, or what is wrong with it."""

    lark: str = ""
    error: str = ""
    param: str | None = None


class Sandbox:
    """A process that tries grammars, one at a time; started at the first, and again after one that it did not survive.
    For one thread.

    **Arguments:** `specials`: tokens that are not text, which grammars may name; `seconds`: what processor time a
    grammar may take. The kernel ends the process that takes more: so a verdict does not depend on what else runs.
    """

    def __init__(self, specials: Mapping[str, int], seconds: float) -> None:
        self._specials = dict(specials)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def prepare(self) -> None:
        """Starts the process where there is none. Raises `GrammarUnavailableError` if it does not start."""
        if self._connection is not None:
            return
        try:
            connection = self._start()
            started = connection.poll(START_SECONDS) and connection.recv_bytes() == _READY
        except (EOFError, OSError):
            started = False
        if not started:
            self.close()
            raise GrammarUnavailableError(
                "grammars cannot be compiled now: the process that checks them does not start"
            )

    def try_out(self, grammar: Grammar) -> str:
        """The grammar in Lark. Raises `GrammarError`, and `GrammarUnavailableError` where nothing can be said of it."""
        self.prepare()
        connection = self._connection
        assert connection is not None
        try:
            connection.send_bytes(msgspec.msgpack.encode(grammar))
            if not connection.poll(PATIENCE_SECONDS):
                self.close()
                raise GrammarUnavailableError(
                    f"{grammar.field} was not compiled within {PATIENCE_SECONDS:g} s, because the machine is busy; "
                    "try again later",
                    param=grammar.field,
                )
            verdict = msgspec.msgpack.decode(connection.recv_bytes(), type=Verdict)
        except (EOFError, OSError) as error:
            if self._ended() == -signal.SIGPROF:
                raise GrammarError(
                    f"{grammar.field} takes more than {self._seconds:g} s of processor time to compile; make it "
                    "smaller",
                    param=grammar.field,
                ) from error
            raise GrammarError(
                f"{grammar.field} needs too much memory, or is nested too deeply; make it smaller",
                param=grammar.field,
            ) from error
        if verdict.error:
            raise GrammarError(verdict.error, param=verdict.param)
        return verdict.lark

    def _ended(self) -> int | None:
        """Ends what is left of the process; how it ended."""
        process = self._process
        assert process is not None
        try:
            status: int | None = process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return status

    def close(self) -> None:
        """Ends the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> Connection:
        mine, theirs = Pipe()
        command = [sys.executable, "-m", "sglang_jax.grammar.sandbox", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        mine.send_bytes(msgspec.msgpack.encode((self._specials, self._seconds)))
        self._connection = mine
        return mine


def main(connection: Connection) -> None:
    """Answers until the connection closes."""
    from sglang_jax.grammar.llguidance_trial import Trial  # after the limits are set

    specials, seconds = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[dict[str, int], float])
    trial = Trial(specials)
    connection.send_bytes(_READY)
    with suppress(EOFError):
        while True:
            grammar = msgspec.msgpack.decode(connection.recv_bytes(), type=Grammar)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                verdict = Verdict(lark=trial.lark(grammar))
            except GrammarError as error:
                verdict = Verdict(error=error.message, param=error.param)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Connection(int(sys.argv[1])))
