"""Tries untrusted grammars in a separate process before the engine compiles them: a grammar may take minutes,
gigabytes, or more stack than there is, which ends a process. It returns the grammar in llguidance's dialect, so that
the engine's threads need almost no Python time for it."""

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

MAX_BYTES = 2 << 30
"""Maximum address space of the process."""

START_SECONDS = 60.0
"""Maximum seconds to start the process on a busy machine; a grammar's time counts from then."""

PATIENCE_SECONDS = 60.0
"""Maximum seconds of wall-clock time of a grammar, on a machine that is busy with other work."""

STACK_BYTES = 8 << 20
"""Stack of the process. Threads that compile the same grammar elsewhere have more, so it fits there too."""


_READY = b"ready"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The grammar in Lark, or its error."""

    lark: str = ""
    error: str = ""
    param: str | None = None


class Sandbox:
    """A process that tries grammars one at a time, started with the first grammar, and again after one that ended it.
    For one thread. `specials`: tokens that are not text, which grammars may name; `seconds`: maximum processor seconds
    of a grammar. The kernel ends a process that takes more, so results do not depend on the machine's load."""

    def __init__(self, specials: Mapping[str, int], seconds: float) -> None:
        self._specials = dict(specials)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def prepare(self) -> None:
        """Starts the process if there is none. Raises `GrammarUnavailableError` if it does not start."""
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
        """Returns the grammar in Lark. Raises `GrammarError`; `GrammarUnavailableError` if it was not tried."""
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
            result = msgspec.msgpack.decode(connection.recv_bytes(), type=TrialResult)
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
        if result.error:
            raise GrammarError(result.error, param=result.param)
        return result.lark

    def _ended(self) -> int | None:
        """Waits for the process to end, or kills it. Returns its exit status, None if it was killed."""
        process = self._process
        assert process is not None
        try:
            status: int | None = process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return status

    def close(self) -> None:
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
    """Tries grammars until the connection closes."""
    from sglang_jax.grammar.llguidance_trial import Trial  # after the limits are set

    specials, seconds = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[dict[str, int], float])
    trial = Trial(specials)
    connection.send_bytes(_READY)
    with suppress(EOFError):
        while True:
            grammar = msgspec.msgpack.decode(connection.recv_bytes(), type=Grammar)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                result = TrialResult(lark=trial.try_out(grammar))
            except GrammarError as error:
                result = TrialResult(error=error.message, param=error.param)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(msgspec.msgpack.encode(result))


if __name__ == "__main__":
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Connection(int(sys.argv[1])))
