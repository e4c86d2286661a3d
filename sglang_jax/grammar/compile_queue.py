"""Decides which grammar is compiled next, and limits the size of all compiled grammars."""

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
    the grammar, so the next request retries. `queued_in`: the flow in whose queue it is, by tenant. `no_room_since`:
    when it was first refused for lack of room."""

    source: Grammar
    waiting: int = 0
    started: float | None = None
    grammar: CompiledGrammar | None = None
    error: GrammarError | GrammarUnavailableError | None = None
    failed: bool = False
    queued_in: dict[str, str] = field(default_factory=dict)
    taken: bool = False
    no_room_since: float | None = None

    @property
    def done(self) -> bool:
        return self.grammar is not None or self.error is not None


class CompileQueue:
    """Grammars that wait for a thread. The next one is of the tenant with the least compile time, and of the tenant's
    request with the least; a request's own are in order of arrival. So a tenant's many slow grammars do not delay those
    of others. Grammars that `admit` refuses for the tenant are skipped."""

    def __init__(self, admit: Callable[[Compilation, str], bool] = lambda compilation, tenant: True) -> None:
        self._admit = admit
        self._waiting: dict[str, dict[str, deque[Compilation]]] = {}
        self._seconds: dict[str, float] = {}
        self._seconds_by_flow: dict[FlowKey, float] = {}
        self._running: list[FlowKey] = []
        self._closed = False
        self._changed = threading.Condition()

    def put(self, compilation: Compilation, flow_key: FlowKey) -> None:
        """Adds a grammar. A new or returning tenant starts at the lowest compile time of the active ones."""
        with self._changed:
            self._put(compilation, flow_key)

    def share(self, compilation: Compilation, flow_key: FlowKey) -> None:
        """Adds another flow that waits for the grammar, which is compiled when either is next."""
        with self._changed:
            if not compilation.taken and flow_key[0] not in compilation.queued_in:
                self._put(compilation, flow_key)

    def _put(self, compilation: Compilation, flow_key: FlowKey) -> None:
        tenant, flow = flow_key
        active = {*self._waiting, *(running for running, _ in self._running)}
        if tenant not in active:
            least = min((self._seconds[other] for other in active), default=0.0)
            self._seconds[tenant] = max(self._seconds.get(tenant, 0.0), least)
        flows = self._waiting.setdefault(tenant, {})
        others = [self._seconds_by_flow[tenant, other] for other in flows]
        others += [self._seconds_by_flow[other] for other in self._running if other[0] == tenant]
        self._seconds_by_flow.setdefault(flow_key, min(others, default=0.0))
        flows.setdefault(flow, deque()).append(compilation)
        compilation.queued_in[tenant] = flow
        self._changed.notify()

    def get(self) -> tuple[Compilation, FlowKey] | None:
        """Waits for the next grammar and its flow; None once closed and empty. The caller calls `done` afterwards."""
        with self._changed:
            while self._waiting or not self._closed:
                flow_key = self._next()
                if flow_key is None:
                    self._changed.wait(_LOOK_SECONDS if self._waiting else None)
                    continue
                compilation = self._waiting[flow_key[0]][flow_key[1]][0]
                compilation.taken = True
                self._running.append(flow_key)
                self._remove(compilation)
                return compilation, flow_key
            return None

    def _next(self) -> FlowKey | None:
        """The flow of the next admitted grammar, or None."""
        for tenant in sorted(self._waiting, key=self._seconds.__getitem__):
            flows = self._waiting[tenant]
            for flow in nsmallest(_MAX_LOOKS, flows, key=self._seconds_of(tenant)):
                if self._admit(flows[flow][0], tenant):
                    return tenant, flow
        return None

    def _seconds_of(self, tenant: str) -> Callable[[str], float]:
        return lambda flow: self._seconds_by_flow[tenant, flow]

    def done(self, flow_key: FlowKey, seconds: float) -> None:
        with self._changed:
            self._running.remove(flow_key)
            self._seconds[flow_key[0]] += seconds
            self._seconds_by_flow[flow_key] += seconds
            self._forget_if_done(flow_key)

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
        for tenant, flow in compilation.queued_in.items():
            self._waiting[tenant][flow].remove(compilation)
            self._forget_if_done((tenant, flow))
        compilation.queued_in.clear()

    def _forget_if_done(self, flow_key: FlowKey) -> None:
        """Forgets the compile time of a flow without waiting or running grammars: new flows keep arriving."""
        tenant, flow = flow_key
        flows = self._waiting.get(tenant, {})
        if flow in flows and not flows[flow]:
            del flows[flow]
            if not flows:
                del self._waiting[tenant]
        if flow not in flows and flow_key not in self._running:
            del self._seconds_by_flow[flow_key]
        if not self._running and not self._waiting:
            self._seconds.clear()


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
