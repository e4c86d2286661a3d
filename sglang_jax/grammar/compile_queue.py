"""Which grammar is compiled next, and how much there is room for."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nsmallest
from weakref import ref

from sglang_jax.errors import GrammarError, GrammarUnavailableError
from sglang_jax.grammar.interface import CompiledGrammar
from sglang_jax.sampling.grammar import Grammar

FlowKey = tuple[str, str]
"""Tenant and client request."""

TENANT_SHARE = 3
"""A tenant's compiled grammars may take so many times as much as is left: three quarters if there is no other, and who
has few finds room for them however many the others have."""

_LOOK_SECONDS = 0.05
"""How often a thread looks whether there is room again."""


_MOST_LOOKS = 64
"""At how many requests of a tenant: there may be thousands."""


@dataclass(slots=True, eq=False)
class Compilation:
    """A grammar that is compiled, or was. `begun`: when a thread began with it; `error` counts where there is one.
    `failed`: the error says nothing of the grammar, so that the next who brings it has it tried again. `waiting`: how
    many wait for it. `places`: the tenants in whose queues it is, and of which of their requests; `taken`: a thread has
    it; `too_large_since`: when there was no room for it."""

    source: Grammar
    waiting: int = 0
    begun: float | None = None
    grammar: CompiledGrammar | None = None
    error: GrammarError | GrammarUnavailableError | None = None
    failed: bool = False
    places: dict[str, str] = field(default_factory=dict)
    taken: bool = False
    too_large_since: float | None = None

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None


class Queue:
    """Grammars that wait for a thread, by tenant and client request. The tenant whose have taken least of the threads'
    time comes next, of its requests the one whose have, and of one's own the first: who brings many that are slow keeps
    nobody else from theirs. One that is not admitted is passed over.

    **Arguments:** `admit`: whether a thread may take one up, of this tenant.
    """

    def __init__(self, admit: Callable[[Compilation, str], bool] = lambda compilation, tenant: True) -> None:
        self._admit = admit
        self._waiting: dict[str, dict[str, deque[Compilation]]] = {}
        self._taken: dict[str, float] = {}
        self._taken_by_flow: dict[FlowKey, float] = {}
        self._running: list[FlowKey] = []
        self._closed = False
        self._changed = threading.Condition()

    def put(self, compilation: Compilation, whose: FlowKey) -> None:
        """Who comes anew, or back, has had as much as the one who has had least."""
        with self._changed:
            self._put(compilation, whose)

    def share(self, compilation: Compilation, whose: FlowKey) -> None:
        """Another one waits for it: it is compiled when it is the turn of either."""
        with self._changed:
            if not compilation.taken and whose[0] not in compilation.places:
                self._put(compilation, whose)

    def _put(self, compilation: Compilation, whose: FlowKey) -> None:
        tenant, flow = whose
        active = {*self._waiting, *(running for running, _ in self._running)}
        if tenant not in active:
            least = min((self._taken[other] for other in active), default=0.0)
            self._taken[tenant] = max(self._taken.get(tenant, 0.0), least)
        flows = self._waiting.setdefault(tenant, {})
        others = [self._taken_by_flow[tenant, other] for other in flows]
        others += [self._taken_by_flow[other] for other in self._running if other[0] == tenant]
        self._taken_by_flow.setdefault(whose, min(others, default=0.0))
        flows.setdefault(flow, deque()).append(compilation)
        compilation.places[tenant] = flow
        self._changed.notify()

    def get(self) -> tuple[Compilation, FlowKey] | None:
        """Waits for the next one, and tells whose it is; None once the queue is closed and empty. `done` is to be
        called afterwards."""
        with self._changed:
            while self._waiting or not self._closed:
                whose = self._next()
                if whose is None:
                    self._changed.wait(_LOOK_SECONDS if self._waiting else None)
                    continue
                compilation = self._waiting[whose[0]][whose[1]][0]
                compilation.taken = True
                self._running.append(whose)
                self._remove(compilation)
                return compilation, whose
            return None

    def _next(self) -> FlowKey | None:
        """Whose first one is next; None if none is admitted."""
        for tenant in sorted(self._waiting, key=self._taken.__getitem__):
            flows = self._waiting[tenant]
            for flow in nsmallest(_MOST_LOOKS, flows, key=self._taken_of(tenant)):
                if self._admit(flows[flow][0], tenant):
                    return tenant, flow
        return None

    def _taken_of(self, tenant: str) -> Callable[[str], float]:
        return lambda flow: self._taken_by_flow[tenant, flow]

    def done(self, whose: FlowKey, seconds: float) -> None:
        """What was got took so long."""
        with self._changed:
            self._running.remove(whose)
            self._taken[whose[0]] += seconds
            self._taken_by_flow[whose] += seconds
            self._forget_if_done(whose)

    def withdraw(self, compilation: Compilation) -> bool:
        """Takes one out; False if a thread has it."""
        with self._changed:
            if compilation.taken or not compilation.places:
                return False
            self._remove(compilation)
            return True

    def close(self) -> None:
        """There will be no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove(self, compilation: Compilation) -> None:
        for tenant, flow in compilation.places.items():
            self._waiting[tenant][flow].remove(compilation)
            self._forget_if_done((tenant, flow))
        compilation.places.clear()

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
        if not self._running and not self._waiting:
            self._taken.clear()


class Held:
    """What compiled grammars there are, be they remembered or only of a request that has not ended; and those that are
    being compiled."""

    def __init__(self) -> None:
        self._characters: Counter[str] = Counter()
        self._admitted: dict[Compilation, str] = {}
        self._grammars: dict[int, tuple[ref[CompiledGrammar], str, int]] = {}
        self._numbers = itertools.count()
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    def admit(self, compilation: Compilation, tenant: str, most: int) -> bool:
        """Whether there is room for one, of `most` characters of all; it takes it then. See `TENANT_SHARE`."""
        size = len(compilation.source.text)
        with self._lock:
            while self._gone:
                _, whose, characters = self._grammars.pop(self._gone.popleft())
                self._give_back(whose, characters)
            left = most - self._characters.total()
            if size > left or self._characters[tenant] + size > TENANT_SHARE * left:
                return False
            self._characters[tenant] += size
            self._admitted[compilation] = tenant
            return True

    def has_admitted(self, compilation: Compilation) -> bool:
        """Whether there was room for one that is being compiled."""
        with self._lock:
            return compilation in self._admitted

    def settle(self, compilation: Compilation) -> None:
        """It is compiled, or will not be."""
        with self._lock:
            tenant = self._admitted.pop(compilation, None)
            if tenant is None:
                return
            size = len(compilation.source.text)
            if compilation.grammar is None:
                self._give_back(tenant, size)
                return
            number = next(self._numbers)
            # Whichever thread drops it last: it takes no lock.
            gone = ref(compilation.grammar, lambda _: self._gone.append(number))
            self._grammars[number] = gone, tenant, size

    def _give_back(self, tenant: str, characters: int) -> None:
        self._characters[tenant] -= characters
        if not self._characters[tenant]:
            del self._characters[tenant]
