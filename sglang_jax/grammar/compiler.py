"""Compiles grammars beside the scheduler's loop: a few threads, each with a sandbox, and a cache by content."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.interface import CompiledGrammar, GrammarBackend
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
"""Of all that are compiled, those of queued requests too: no further one is until some have gone. 1.1 GB at most."""

MOST_HELD_SECONDS = 60.0
"""How long one waits for that."""

_LOOK_SECONDS = 0.02
"""How often a thread looks whether some have gone."""

FlowKey = tuple[str, str]

_THREAD_STACK_BYTES = 8 * STACK_BYTES


class Trier(Protocol):
    """What looks at a grammar first. See `Sandbox`."""

    def prepare(self) -> None: ...

    def try_out(self, grammar: Grammar) -> str: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that is compiled, or was. `begun`: when a thread took it up; `error` counts where there is one.
    `failed`: the error says nothing of the grammar, so that the next who brings it has it tried again. `waiting`: how
    many wait for it."""

    source: Grammar
    waiting: int = 0
    begun: float | None = None
    grammar: CompiledGrammar | None = None
    error: GrammarError | GrammarUnavailableError | None = None
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None


class Queue:
    """Grammars that wait for a thread, by tenant and client request. The tenant whose have taken least of the threads'
    time comes next, of its requests the one whose have, and of one's own the first: who brings many that are slow keeps
    nobody else from theirs."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[Compilation]]] = {}
        self._taken: dict[str, float] = {}
        self._taken_by_flow: dict[FlowKey, float] = {}
        self._running: list[FlowKey] = []
        self._closed = False
        self._changed = threading.Condition()

    def put(self, compilation: Compilation, whose: FlowKey) -> None:
        """Who comes anew has had as much as the one who has had least."""
        tenant, flow = whose
        with self._changed:
            self._taken.setdefault(tenant, min(self._taken.values(), default=0.0))
            flows = self._waiting.setdefault(tenant, {})
            others = [self._taken_by_flow[tenant, other] for other in flows]
            others += [self._taken_by_flow[other] for other in self._running if other[0] == tenant]
            self._taken_by_flow.setdefault(whose, min(others, default=0.0))
            flows.setdefault(flow, deque()).append(compilation)
            self._changed.notify()

    def get(self) -> tuple[Compilation, FlowKey] | None:
        """Waits for the next one, and tells whose it is; None once the queue is closed and empty. `done` is to be
        called afterwards."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            tenant = min(self._waiting, key=self._taken.__getitem__)
            flow = min(self._waiting[tenant], key=lambda one: self._taken_by_flow[tenant, one])
            whose = tenant, flow
            compilation = self._waiting[tenant][flow].popleft()
            self._running.append(whose)
            self._forget_if_done(whose)
            return compilation, whose

    def done(self, whose: FlowKey, seconds: float) -> None:
        """What was got took so long."""
        with self._changed:
            self._running.remove(whose)
            self._taken[whose[0]] += seconds
            self._taken_by_flow[whose] += seconds
            self._forget_if_done(whose)
            if not self._running and not self._waiting:
                self._taken.clear()

    def withdraw(self, compilation: Compilation) -> bool:
        """Takes one out; False if a thread has it."""
        with self._changed:
            for tenant, flows in self._waiting.items():
                for flow, waiting in flows.items():
                    if compilation in waiting:
                        waiting.remove(compilation)
                        self._forget_if_done((tenant, flow))
                        return True
            return False

    def close(self) -> None:
        """There will be no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget_if_done(self, whose: FlowKey) -> None:
        """There are ever new requests: what they have taken is known as long as something of theirs waits or runs."""
        tenant, flow = whose
        flows = self._waiting.get(tenant, {})
        if flow in flows and not flows[flow]:
            del flows[flow]
            if not flows:
                del self._waiting[tenant]
        if flow not in flows and whose not in self._running:
            del self._taken_by_flow[whose]


class Held:
    """What compiled grammars there are, be they remembered or only of a request that has not ended."""

    def __init__(self) -> None:
        self._grammars: list[tuple[ref[CompiledGrammar], int]] = []
        self._lock = threading.Lock()

    def add(self, grammar: CompiledGrammar, characters: int) -> None:
        with self._lock:
            self._grammars.append((ref(grammar), characters))

    @property
    def characters(self) -> int:
        """Of those that there still are."""
        with self._lock:
            self._grammars = [one for one in self._grammars if one[0]() is not None]
            return sum(characters for _, characters in self._grammars)


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
        self._queue = Queue()
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
            self._queue.done(whose, self._clock() - begin)
            self._news.set()
        trier.close()

    def _compile(self, trier: Trier, compilation: Compilation) -> None:
        try:
            trier.prepare()
            source = compilation.source
            self._wait_for_room(source)
            compilation.begun = self._clock()
            grammar = self.backend.build(source, trier.try_out(source))
            self._held.add(grammar, len(source.text))
            compilation.grammar = grammar
        except GrammarUnavailableError as error:
            compilation.failed, compilation.error = True, compilation.error or error
        except GrammarError as error:
            compilation.error = compilation.error or error

    def _wait_for_room(self, source: Grammar) -> None:
        until = self._clock() + MOST_HELD_SECONDS
        while self._held.characters + len(source.text) > MOST_HELD_CHARACTERS:
            if self._clock() > until:
                raise GrammarUnavailableError(
                    f"{source.field} was not compiled within {MOST_HELD_SECONDS:g} s: the grammars of requests in "
                    "progress take all the memory that there is for grammars; send it again later",
                    param=source.field,
                )
            time.sleep(_LOOK_SECONDS)

    def _forget(self) -> None:
        """What was asked for longest ago goes, but not what is still compiled."""
        built = characters = 0
        for known, (content, compilation) in enumerate(reversed(list(self._known.items())), 1):
            characters += len(compilation.source.text)
            built += compilation.grammar is not None
            over = known > MOST_CACHED or built > MOST_BUILT or characters > MOST_CACHED_CHARACTERS
            if over and compilation.done:
                del self._known[content]
