"""Whose turn it is: those that wait have equal parts of the tokens, tenant by tenant, and the client requests of each
tenant among themselves.

A client request is what a client sent at once, however many prompts and completions it is: a *flow* of requests here.
Flows are queued fairly on two levels, by the tokens that each was given (start-time fair queueing, Goyal, Vin and Cheng
1996). Where a newcomer begins, a clock says that goes on by what is given divided by how many wait (Parekh and Gallager
1993): a clock that told where the last one served had begun would stand still while newcomers come, and who was served
once would wait until none do.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, TypeVar

from sglang_jax.scheduler.order import Key, Order
from sglang_jax.scheduler.request import FlowKey, Request

Place = tuple[float, int]
"""Who has the lowest is next: tokens that a child was given, and when the first of its requests came."""


_FEW = 64


class _Child(ABC):
    """One of those that share: `given`: tokens that it was given, or the clock where it began later; `place`: with
    which it stands among the others, None while nothing of it waits."""

    def __init__(self, given: float) -> None:
        self.given = given
        self.place: Place | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Requests of it that wait, or children that have such."""

    @property
    @abstractmethod
    def head(self) -> Request:
        """The request of it that is next."""

    @abstractmethod
    def upcoming(self, count: int) -> Iterator[Request]:
        """Its next `count` requests, as things are now."""


class Flow(_Child):
    """What waits of one client request, in the order of arrival; or of a tenant, in an order of its own."""

    def __init__(self, given: float) -> None:
        super().__init__(given)
        self.waiting: Order[Request] = Order()

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def head(self) -> Request:
        return self.waiting.head()

    def upcoming(self, count: int) -> Iterator[Request]:
        return self.waiting.first(count)


Child = TypeVar("Child", bound=_Child)


class Shares(Generic[Child]):
    """Children that have equal parts while they wait.

    The clock is how far each would be by now if all had their parts at the same time, to the token: those that wait,
    and those that were given theirs before, until the clock has caught up with them. So it is the mean of what they
    were given, and who waits is behind it by no more than a request. A newcomer begins there: who asked for nothing has
    saved nothing up, and who comes back before the clock has caught up gains nothing by it.
    """

    def __init__(self, make: Callable[[float], Child]) -> None:
        self._make = make
        self._clock = 0.0
        self._children: dict[str, Child] = {}
        self._ahead: dict[str, float] = {}
        self._next_caught_up: list[tuple[float, str]] = []
        self.order: Order[Child] = Order()

    def child(self, name: str) -> Child:
        """The child of this name, which is made if nothing of it waits; who adds to it calls `settle`."""
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = self._make(max(self._clock, self._ahead.pop(name, 0.0)))
        return child

    def give(self, child: Child, tokens: int) -> None:
        """A request of this child has its turn: so many tokens."""
        child.given += tokens
        self._go_on(tokens)

    def settle(self, name: str, child: Child) -> None:
        """Puts a child in its place, after it was given something or what waits of it has changed."""
        if child.place is not None:
            self.order.remove(child.place, child)
            child.place = None
        if len(child):
            child.place = (child.given, child.head.sequence)
            self.order.add(child.place, child)
        else:
            del self._children[name]
            self._leave(name, child.given)

    def _leave(self, name: str, given: float) -> None:
        if not self._children:  # nobody waits: all begin anew
            self._clock = 0.0
            self._ahead.clear()
            self._next_caught_up.clear()
        elif given > self._clock:
            self._ahead[name] = given
            heapq.heappush(self._next_caught_up, (given, name))
            if len(self._next_caught_up) > 2 * len(self._ahead) + _FEW:  # most have come back since
                self._next_caught_up = [(given, name) for name, given in self._ahead.items()]
                heapq.heapify(self._next_caught_up)
        else:
            self._go_on(self._clock - given)  # what was its part others have had

    def _go_on(self, tokens: float) -> None:
        """So many tokens go by, in equal parts."""
        while tokens > 0.0:
            taking_part = len(self._children) + len(self._ahead)
            given, name = self._next_caught_up[0] if self._next_caught_up else (math.inf, "")
            if (given - self._clock) * taking_part > tokens:
                self._clock += tokens / taking_part
                break
            heapq.heappop(self._next_caught_up)
            if self._ahead.get(name) == given:  # it may have come back since
                tokens -= max(given - self._clock, 0.0) * taking_part
                self._clock = max(self._clock, given)
                del self._ahead[name]


class Tenant(_Child):
    """What waits of one tenant, by client request."""

    def __init__(self, given: float) -> None:
        super().__init__(given)
        self.flows: Shares[Flow] = Shares(Flow)

    def __len__(self) -> int:
        return len(self.flows.order)

    @property
    def head(self) -> Request:
        return self.flows.order.head().head

    def upcoming(self, count: int) -> Iterator[Request]:
        return _in_turn(self.flows.order.first(count), count)


def _by_arrival(request: Request) -> Key:
    return (request.sequence,)


class Turns:
    """The requests that wait, in the order of their turns. With one flow it is the order of arrival, and with flows of
    one request each of one tenant as well.

    **Arguments:** `key`: order of the requests of a flow; `by_flow`: whether the client requests of a tenant have turns
    as well: if not, all of its requests are one flow.
    """

    def __init__(self, key: Callable[[Request], Key] = _by_arrival, *, by_flow: bool = True) -> None:
        self._key = key
        self._by_flow = by_flow
        self._tenants: Shares[Tenant] = Shares(Tenant)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        """A request waits for its turn."""
        name, flow_name = self._names(request)
        tenant = self._tenants.child(name)
        flow = tenant.flows.child(flow_name)
        flow.waiting.add(self._key(request), request)
        self._count += 1
        if flow.place is None or request is flow.head:
            tenant.flows.settle(flow_name, flow)
            self._tenants.settle(name, tenant)

    def remove(self, request: Request, tokens: int = 0) -> None:
        """A request waits no more: it was given so many `tokens`, or none, as it left."""
        name, flow_name = self._names(request)
        tenant = self._tenants.child(name)
        flow = tenant.flows.child(flow_name)
        flow.waiting.remove(self._key(request), request)
        self._count -= 1
        if tokens:
            tenant.flows.give(flow, tokens)
            self._tenants.give(tenant, tokens)
        tenant.flows.settle(flow_name, flow)
        self._tenants.settle(name, tenant)

    def _names(self, request: Request) -> FlowKey:
        return request.flow_key if self._by_flow else (request.flow_key[0], "")

    def first(self, count: int) -> Iterator[Request]:
        """The first `count`, as they are now: in the order in which they would have their turns, were nobody to come or
        to leave."""
        return _in_turn(self._tenants.order.first(count), count)

    def first_but_of(self, flows: Collection[FlowKey]) -> Request | None:
        """The first that is of none of these flows; None if there is nobody."""
        for tenant in self._tenants.order.first(len(self._tenants.order)):
            for flow in tenant.flows.order.first(len(flows) + 1):
                if flow.head.flow_key not in flows:
                    return flow.head
        return None


_Again = tuple[float, int, Request, Iterator[Request]]
"""A child that was served: its place, the request that is next, and those behind it."""


def _in_turn(children: Iterable[_Child], count: int) -> Iterator[Request]:
    """Requests of children, which come in their order: a child that was served stands further behind."""
    again: list[_Again] = []
    for child in children:
        place = child.place
        while again and place is not None and again[0][:2] < place:
            yield _serve(again)
        if len(child) == 1 and isinstance(child, Flow):
            yield child.head
            continue
        given, requests = child.given, child.upcoming(count)
        request = next(requests, None)
        if request is None:  # what waited of it was taken out meanwhile
            continue
        following = next(requests, None)
        if following is not None:
            heapq.heappush(again, (given + request.waiting.cost, following.sequence, following, requests))
        yield request
    while again:
        yield _serve(again)


def _serve(again: list[_Again]) -> Request:
    """Who is first in the heap, in whose place its child's next request comes."""
    given, _, request, requests = again[0]
    following = next(requests, None)
    if following is None:
        heapq.heappop(again)
    else:
        heapq.heapreplace(again, (given + request.waiting.cost, following.sequence, following, requests))
    return request
