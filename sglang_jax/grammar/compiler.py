"""Compiles grammars beside the scheduler's loop: a few threads, each with a sandbox, and a cache by content."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.interface import CompiledGrammar, GrammarBackend
from sglang_jax.grammar.sandbox import PATIENCE_SECONDS, STACK_BYTES, Sandbox
from sglang_jax.sampling.grammar import Grammar, GrammarKind

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2

COMPILE_SECONDS = 10.0
"""Most processor time that a grammar may take in the sandbox."""

MOST_CACHED = 128
MOST_CACHED_CHARACTERS = 4 << 20
"""Grammars that are kept for whoever brings the same text again, the refused ones too."""


_THREAD_STACK_BYTES = 8 * STACK_BYTES


class Trier(Protocol):
    """What looks at a grammar first. See `Sandbox`."""

    def prepare(self) -> None: ...

    def try_out(self, grammar: Grammar) -> str: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that is compiled, or was. `begun`: when a thread took it up; `error` counts where there is one.
    `failed`: the error says nothing of the grammar, so that the next who brings it has it tried again."""

    source: Grammar
    begun: float | None = None
    grammar: CompiledGrammar | None = None
    error: GrammarError | GrammarUnavailableError | None = None
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None


class GrammarCompiler:
    """See the module's text. For one thread, beside its own.

    **Arguments:** `seconds`: see `COMPILE_SECONDS`; `clock`: tells seconds; `trier`: makes a thread's sandbox.
    """

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
        self._characters = 0
        self._queue: queue.SimpleQueue[Compilation | None] = queue.SimpleQueue()
        self._news = threading.Event()
        self._threads = threads
        self._started = False

    def start(self, grammar: Grammar) -> Compilation:
        """The compilation of a grammar, which may be over, or under way for somebody else."""
        found = self._known.get(grammar.content)
        if found is not None and found.failed:
            del self._known[grammar.content]
            self._characters -= len(found.source.text)
        elif found is not None:
            self._known.move_to_end(grammar.content)
            return found
        self._start_threads()
        compilation = self._known[grammar.content] = Compilation(grammar)
        self._characters += len(grammar.text)
        self._forget()
        self._queue.put(compilation)
        return compilation

    def settled(self, compilation: Compilation) -> bool:
        """Whether it is over, be it that it took too long."""
        begun, most = compilation.begun, 2 * PATIENCE_SECONDS
        if not compilation.done and begun is not None and self._clock() - begun > most:
            field = compilation.source.field
            compilation.failed = True
            compilation.error = GrammarUnavailableError(f"{field} was not compiled within {most:g} s", param=field)
        return compilation.done

    def wait(self, seconds: float) -> None:
        """Returns when something was compiled since the last call, or after so long."""
        if self._news.wait(seconds):
            self._news.clear()

    def close(self) -> None:
        """Ends the threads, once they are done with what they have."""
        if self._started:
            for _ in range(self._threads):
                self._queue.put(None)

    def _start_threads(self) -> None:
        """With the first grammar: most engines never see one. Nobody waits for them at the end of the process."""
        if self._started:
            return
        self._started = True
        usual = threading.stack_size(_THREAD_STACK_BYTES)
        for number in range(self._threads):
            threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True).start()
        threading.stack_size(usual)

    def _work(self) -> None:
        trier = self._trier()
        while (compilation := self._queue.get()) is not None:
            try:
                self._compile(trier, compilation)
            except BaseException:  # a panic of the library is no `Exception`; the thread is there for others too
                trier.close()  # what it was about to answer is not the next one's answer
                field = compilation.source.field
                logger.exception("compiling the grammar of %s failed", field)
                compilation.failed = True
                compilation.error = compilation.error or GrammarUnavailableError(
                    f"{field} could not be compiled; the engine's log says why", param=field
                )
            self._news.set()
        trier.close()

    def _compile(self, trier: Trier, compilation: Compilation) -> None:
        try:
            trier.prepare()
            compilation.begun = self._clock()
            source = compilation.source
            compilation.grammar = self.backend.build(source, trier.try_out(source))
        except GrammarUnavailableError as error:
            compilation.failed, compilation.error = True, compilation.error or error
        except GrammarError as error:
            compilation.error = compilation.error or error

    def _forget(self) -> None:
        """What was asked for longest ago goes, but not what is still compiled."""
        for content, compilation in list(self._known.items()):
            if len(self._known) <= MOST_CACHED and self._characters <= MOST_CACHED_CHARACTERS:
                return
            if compilation.done:
                del self._known[content]
                self._characters -= len(compilation.source.text)
