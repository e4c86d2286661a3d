"""Compiles grammars in the background, in a few threads with a sandbox each, and caches them by content."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.compile_queue import Compilation, CompileQueue, GrammarRoom
from sglang_jax.grammar.interface import GrammarBackend
from sglang_jax.grammar.sandbox import PATIENCE_SECONDS, STACK_BYTES, Sandbox
from sglang_jax.queues.fair_queue import FlowKey
from sglang_jax.sampling.grammar import Grammar, GrammarKind

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2

COMPILE_SECONDS = 10.0
"""Maximum processor seconds of a grammar in the sandbox."""

MAX_CACHED = 128
"""Maximum cached results of compilations, including errors."""

MAX_CACHED_CHARACTERS = 1 << 20
MAX_BUILT = 32
"""Maximum cached compiled grammars, in addition to those of running requests. One takes up to 24 MB for 90,000
characters, plus 60 MB for the states that its outputs have met: 2.2 GB at most, and usually a thousandth of that."""

MAX_HELD_CHARACTERS = 4 << 20
"""Maximum characters of all compiled grammars, including those of queued requests: 1.1 GB at most. Further ones wait
until there is room. For a tenant's share, see `TENANT_SHARE`."""

MAX_HELD_SECONDS = 60.0
"""Maximum seconds of that wait."""

_THREAD_STACK_BYTES = 8 * STACK_BYTES


class Trier(Protocol):
    def prepare(self) -> None: ...

    def try_out(self, grammar: Grammar) -> str: ...

    def close(self) -> None: ...


class GrammarCompiler:
    """For one thread, apart from its own. `seconds`: see `COMPILE_SECONDS`; `clock`: returns seconds; `trier`: creates
    a thread's sandbox."""

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        threads: int = COMPILE_THREADS,
        seconds: float = COMPILE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        trier: Callable[[], Trier] | None = None,
    ) -> None:
        self.backend = backend
        self._trier = trier or (lambda: Sandbox(backend.specials, seconds))
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[tuple[GrammarKind, str], Compilation] = OrderedDict()
        self._room = GrammarRoom()
        self._queue = CompileQueue(self._admit)
        self._finished = threading.Event()
        self._threads = threads
        self._started = False

    def start(self, grammar: Grammar, flow_key: FlowKey = ("", "")) -> Compilation:
        """Returns the compilation of a grammar, which may have ended, or be in progress for another request. A caller
        that stops waiting before it is settled calls `leave`."""
        found = self._known.get(grammar.content)
        if found is not None and not found.failed and not (found.grammar is not None and found.grammar.exhausted):
            self._known.move_to_end(grammar.content)
            found.waiting += 1
            self._queue.share(found, flow_key)
            return found
        self._start_threads()
        compilation = Compilation(grammar, waiting=1)
        self._known[grammar.content] = compilation
        self._known.move_to_end(grammar.content)
        self._evict()
        self._queue.put(compilation, flow_key)
        return compilation

    def leave(self, compilation: Compilation) -> None:
        """Notes that a request has stopped waiting. A grammar without waiting requests is not compiled."""
        compilation.waiting -= 1
        withdrawn = compilation.waiting == 0 and self._queue.withdraw(compilation)
        if withdrawn and self._known.get(compilation.source.content) is compilation:
            del self._known[compilation.source.content]

    def settled(self, compilation: Compilation) -> bool:
        """Whether the compilation has ended, or took too long."""
        started, most = compilation.started, 2 * PATIENCE_SECONDS
        if not compilation.done and started is not None and self._clock() - started > most:
            field = compilation.source.field
            compilation.failed = True
            compilation.error = GrammarUnavailableError(f"{field} was not compiled within {most:g} s", param=field)
        return compilation.done

    def wait(self, seconds: float) -> None:
        """Waits until a grammar has been compiled since the last call, at most `seconds`."""
        if self._finished.wait(seconds):
            self._finished.clear()

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._queue.close()

    def _start_threads(self) -> None:
        """Starts the threads with the first grammar: most engines never see one. They do not delay an exit."""
        if self._started:
            return
        self._started = True
        usual = threading.stack_size(_THREAD_STACK_BYTES)
        for number in range(self._threads):
            threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True).start()
        threading.stack_size(usual)

    def _work(self) -> None:
        trier = self._trier()
        while (got := self._queue.get()) is not None:
            compilation, flow_key = got
            begin = self._clock()
            try:
                self._compile(trier, compilation)
            except BaseException:  # a panic of the library is not an `Exception`, and must not end the thread
                trier.close()  # a late answer would be taken for the next grammar's
                field = compilation.source.field
                logger.exception("compiling the grammar of %s failed", field)
                compilation.failed = True
                compilation.error = compilation.error or GrammarUnavailableError(
                    f"{field} could not be compiled; for the reason see the engine's log", param=field
                )
            self._room.settle(compilation)
            self._queue.done(flow_key, self._clock() - begin)
            self._finished.set()
        trier.close()

    def _compile(self, trier: Trier, compilation: Compilation) -> None:
        try:
            trier.prepare()
            source = compilation.source
            self._check_room(compilation)
            compilation.started = self._clock()
            compilation.grammar = self.backend.build(source, trier.try_out(source))
        except GrammarUnavailableError as error:
            compilation.failed, compilation.error = True, compilation.error or error
        except GrammarError as error:
            compilation.error = compilation.error or error

    def _admit(self, compilation: Compilation, tenant: str) -> bool:
        """Whether a thread takes it: there is room for it, or it has waited for room too long, and fails."""
        if self._room.admit(compilation, tenant, MAX_HELD_CHARACTERS):
            return True
        now = self._clock()
        compilation.no_room_since = now if compilation.no_room_since is None else compilation.no_room_since
        return now - compilation.no_room_since > MAX_HELD_SECONDS

    def _check_room(self, compilation: Compilation) -> None:
        if not self._room.has_admitted(compilation):
            field = compilation.source.field
            raise GrammarUnavailableError(
                f"{field} was not compiled within {MAX_HELD_SECONDS:g} s: the grammars of requests in progress take "
                "all the memory that there is for grammars; send it again later",
                param=field,
            )

    def _evict(self) -> None:
        built = characters = 0
        for known, (content, compilation) in enumerate(reversed(list(self._known.items())), 1):
            characters += len(compilation.source.text)
            built += compilation.grammar is not None
            over = known > MAX_CACHED or built > MAX_BUILT or characters > MAX_CACHED_CHARACTERS
            if over and compilation.done:
                del self._known[content]
