"""Decides which grammar is compiled next, and limits the size of all compiled grammars."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.interface import CompiledGrammar
from sglang_jax.queues.fair_queue import FairQueue, FlowKey
from sglang_jax.sampling.grammar import Grammar

TENANT_SHARE = 3
"""A tenant's compiled grammars may take this many times the remaining room: three quarters of all if no other tenant
has any. So a tenant with few grammars finds room however many the others have."""

_LOOK_SECONDS = 0.05
"""Seconds between two checks whether there is room again."""


_MAX_LOOKS = 64
"""Maximum requests of a tenant that are checked: there may be thousands."""


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that is being compiled, or was. `waiting`: number of requests that wait for it; `started`: when a
    thread started it; `taken`: a thread has it. `error` decides if it is set; `failed`: the error does not depend on
    the grammar, so the next request retries. `queued_in`: where it is queued, by tenant. `no_room_since`:
    when it was first refused for lack of room."""

    source: Grammar
    waiting: int = 0
    started: float | None = None
    grammar: CompiledGrammar | None = None
    error: GrammarError | GrammarUnavailableError | None = None
    failed: bool = False
    queued_in: dict[str, Entry] = field(default_factory=dict)
    taken: bool = False
    no_room_since: float | None = None

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Entry:
    """A grammar in the queue of one flow. `number`: order of arrival."""

    compilation: Compilation
    flow_key: FlowKey
    number: int


class CompileQueue:
    """Grammars that wait for a thread. The next one is of the tenant with the least compile time, and of the tenant's
    request with the least; a request's own are in order of arrival. So a tenant's many slow grammars do not delay those
    of others. Grammars that `admit` refuses for the tenant are skipped."""

    def __init__(self, admit: Callable[[Compilation, str], bool] = lambda compilation, tenant: True) -> None:
        self._admit = admit
        self._queue: FairQueue[Entry] = FairQueue(
            lambda entry: entry.flow_key,
            lambda entry: entry.number,
            lambda entry: 0.0,
            key=lambda entry: (entry.number,),
        )
        self._numbers = itertools.count()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, compilation: Compilation, flow_key: FlowKey) -> None:
        with self._changed:
            self._put(compilation, flow_key)

    def share(self, compilation: Compilation, flow_key: FlowKey) -> None:
        """Adds another flow that waits for the grammar, which is compiled when either is next."""
        with self._changed:
            if not compilation.taken and flow_key[0] not in compilation.queued_in:
                self._put(compilation, flow_key)

    def _put(self, compilation: Compilation, flow_key: FlowKey) -> None:
        entry = compilation.queued_in[flow_key[0]] = Entry(compilation, flow_key, next(self._numbers))
        self._queue.add(entry)
        self._changed.notify()

    def get(self) -> tuple[Compilation, FlowKey] | None:
        """Waits for the next grammar and its flow; None once closed and empty. The caller calls `done` afterwards."""
        with self._changed:
            while self._queue or not self._closed:
                entry = self._next()
                if entry is None:
                    self._changed.wait(_LOOK_SECONDS if self._queue else None)
                    continue
                entry.compilation.taken = True
                self._remove(entry.compilation)
                return entry.compilation, entry.flow_key
            return None

    def _next(self) -> Entry | None:
        """The next admitted grammar, or None."""
        heads = self._queue.heads(_MAX_LOOKS)
        return next((entry for entry in heads if self._admit(entry.compilation, entry.flow_key[0])), None)

    def done(self, flow_key: FlowKey, seconds: float) -> None:
        with self._changed:
            self._queue.charge(flow_key, seconds)

    def withdraw(self, compilation: Compilation) -> bool:
        """Removes a grammar. Returns False if a thread has it."""
        with self._changed:
            if compilation.taken or not compilation.queued_in:
                return False
            self._remove(compilation)
            return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove(self, compilation: Compilation) -> None:
        for entry in compilation.queued_in.values():
            self._queue.remove(entry)
        compilation.queued_in.clear()


class GrammarRoom:
    """Counts the characters of all compiled grammars, cached or only in use, and of those being compiled."""

    def __init__(self) -> None:
        self._characters: Counter[str] = Counter()
        self._admitted: dict[Compilation, str] = {}
        self._grammars: dict[int, tuple[ref[CompiledGrammar], str, int]] = {}
        self._numbers = itertools.count()
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    def admit(self, compilation: Compilation, tenant: str, most: int) -> bool:
        """Reserves room for a grammar within `most` characters in total and `TENANT_SHARE`, if there is any."""
        size = len(compilation.source.text)
        with self._lock:
            while self._freed:
                _, flow_key, characters = self._grammars.pop(self._freed.popleft())
                self._give_back(flow_key, characters)
            left = most - self._characters.total()
            if size > left or self._characters[tenant] + size > TENANT_SHARE * left:
                return False
            self._characters[tenant] += size
            self._admitted[compilation] = tenant
            return True

    def has_admitted(self, compilation: Compilation) -> bool:
        with self._lock:
            return compilation in self._admitted

    def settle(self, compilation: Compilation) -> None:
        """Notes that a grammar was compiled or failed. Its room is released with the grammar, or now."""
        with self._lock:
            tenant = self._admitted.pop(compilation, None)
            if tenant is None:
                return
            size = len(compilation.source.text)
            if compilation.grammar is None:
                self._give_back(tenant, size)
                return
            number = next(self._numbers)
            # May be called on any thread, so it takes no lock.
            gone = ref(compilation.grammar, lambda _: self._freed.append(number))
            self._grammars[number] = gone, tenant, size

    def _give_back(self, tenant: str, characters: int) -> None:
        self._characters[tenant] -= characters
        if not self._characters[tenant]:
            del self._characters[tenant]
