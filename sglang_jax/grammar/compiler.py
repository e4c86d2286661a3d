"""Compiles grammars beside the scheduler's loop: a few threads, each with a sandbox, and a cache by content."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.compile_queue import Compilation, FlowKey, Held, Queue
from sglang_jax.grammar.interface import GrammarBackend
from sglang_jax.grammar.sandbox import PATIENCE_SECONDS, STACK_BYTES, Sandbox
from sglang_jax.sampling.grammar import Grammar, GrammarKind

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2

COMPILE_SECONDS = 10.0
"""Most processor time that a grammar may take in the sandbox."""

MOST_CACHED = 128
"""Grammars that are remembered for whoever brings the same text again, the refused ones too."""

MOST_CACHED_CHARACTERS = 1 << 20
MOST_BUILT = 32
"""How many of them are compiled ones, beside those that requests have. One takes up to 24 MB for 90,000 characters as
it is, and 60 MB more for what its outputs have met: so 2.2 GB at most, where a thousandth of it is usual."""

MOST_HELD_CHARACTERS = 4 << 20
"""Of all that are compiled, those of queued requests too: no further one is until some have gone. 1.1 GB at most. What
a tenant's may have of it, see `Held`."""

MOST_HELD_SECONDS = 60.0
"""How long one waits for that."""

_THREAD_STACK_BYTES = 8 * STACK_BYTES


class Trier(Protocol):
    """What looks at a grammar first. See `Sandbox`."""

    def prepare(self) -> None: ...

    def try_out(self, grammar: Grammar) -> str: ...

    def close(self) -> None: ...


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
        self._held = Held()
        self._queue = Queue(self._admit)
        self._news = threading.Event()
        self._threads = threads
        self._started = False

    def start(self, grammar: Grammar, whose: FlowKey = ("", "")) -> Compilation:
        """The compilation of a grammar, which may be over, or under way for somebody else. Who waits for it no longer
        calls `leave`, unless it is settled. `whose`: tenant and client request."""
        found = self._known.get(grammar.content)
        if found is not None and not found.failed and not (found.grammar is not None and found.grammar.spoiled):
            self._known.move_to_end(grammar.content)
            found.waiting += 1
            self._queue.share(found, whose)
            return found
        self._start_threads()
        compilation = Compilation(grammar, waiting=1)
        self._known[grammar.content] = compilation
        self._known.move_to_end(grammar.content)
        self._forget()
        self._queue.put(compilation, whose)
        return compilation

    def leave(self, compilation: Compilation) -> None:
        """One who waited for it has left. What nobody waits for is not begun: it would be in the way of others, for
        clients that are gone."""
        compilation.waiting -= 1
        withdrawn = compilation.waiting == 0 and self._queue.withdraw(compilation)
        if withdrawn and self._known.get(compilation.source.content) is compilation:
            del self._known[compilation.source.content]

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
        self._queue.close()

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
        while (got := self._queue.get()) is not None:
            compilation, whose = got
            begin = self._clock()
            try:
                self._compile(trier, compilation)
            except BaseException:  # a panic of the library is no `Exception`; the thread is there for others too
                trier.close()  # what it was about to answer is not the next one's answer
                field = compilation.source.field
                logger.exception("compiling the grammar of %s failed", field)
                compilation.failed = True
                compilation.error = compilation.error or GrammarUnavailableError(
                    f"{field} could not be compiled; for the reason see the engine's log", param=field
                )
            self._held.settle(compilation)
            self._queue.done(whose, self._clock() - begin)
            self._news.set()
        trier.close()

    def _compile(self, trier: Trier, compilation: Compilation) -> None:
        try:
            trier.prepare()
            source = compilation.source
            self._check_room(compilation)
            compilation.begun = self._clock()
            compilation.grammar = self.backend.build(source, trier.try_out(source))
        except GrammarUnavailableError as error:
            compilation.failed, compilation.error = True, compilation.error or error
        except GrammarError as error:
            compilation.error = compilation.error or error

    def _admit(self, compilation: Compilation, tenant: str) -> bool:
        """Whether a thread takes it up: there is room for it, or it has waited for that for as long as it may."""
        if self._held.admit(compilation, tenant, MOST_HELD_CHARACTERS):
            return True
        now = self._clock()
        compilation.too_large_since = now if compilation.too_large_since is None else compilation.too_large_since
        return now - compilation.too_large_since > MOST_HELD_SECONDS

    def _check_room(self, compilation: Compilation) -> None:
        if not self._held.has_admitted(compilation):
            field = compilation.source.field
            raise GrammarUnavailableError(
                f"{field} was not compiled within {MOST_HELD_SECONDS:g} s: the grammars of requests in progress take "
                "all the memory that there is for grammars; send it again later",
                param=field,
            )

    def _forget(self) -> None:
        """What was asked for longest ago goes, but not what is still compiled."""
        built = characters = 0
        for known, (content, compilation) in enumerate(reversed(list(self._known.items())), 1):
            characters += len(compilation.source.text)
            built += compilation.grammar is not None
            over = known > MOST_CACHED or built > MOST_BUILT or characters > MOST_CACHED_CHARACTERS
            if over and compilation.done:
                del self._known[content]
