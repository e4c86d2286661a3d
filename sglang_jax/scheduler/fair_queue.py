"""The fair order of waiting requests: tenants get equal shares of the tokens, and so do the client requests of each
tenant.

A client request, with any number of prompts and completions, is a *flow* of requests. Flows are queued fairly on two
levels, by the tokens that each was served (start-time fair queueing, Goyal, Vin and Cheng 1996). A newcomer starts at a
virtual clock, which advances by the served tokens divided by the number of waiting flows (Parekh and Gallager 1993). A
clock at the start of the flow served last would stand still while newcomers arrive, and a flow that was served once
would wait until none do.
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
"""Tokens that a child was served, and the arrival of its first request; the child with the lowest place is next."""

_FEW = 64


class _Child(ABC):
    """A tenant or a flow. `given`: tokens that it was served, at least the clock at its arrival; `place`: in the order,
    None while it has no waiting requests."""

    def __init__(self, given: float) -> None:
        self.given = given
        self.place: Place | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of its waiting requests, or of its children that have any."""

    @property
    @abstractmethod
    def head(self) -> Request:
        """Its next request."""

    @abstractmethod
    def upcoming(self, count: int) -> Iterator[Request]:
        """Its next `count` requests, as of now."""


class Flow(_Child):
    """The waiting requests of one client request, in order of arrival; or of a tenant, in the order of a policy."""

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
    """Children that get equal shares while they wait.

    The clock is the number of tokens that each child would have been served if all were served at once, token by token:
    those that wait, and those ahead of the clock that no longer wait. So it is the mean of what they were served, and a
    waiting child is behind it by at most one request. A newcomer starts at the clock: a child saves nothing up while
    idle, and gains nothing by returning before the clock has caught up with it.
    """

    def __init__(self, make: Callable[[float], Child]) -> None:
        self._make = make
        self._clock = 0.0
        self._children: dict[str, Child] = {}
        self._ahead: dict[str, float] = {}
        self._next_caught_up: list[tuple[float, str]] = []
        self.order: Order[Child] = Order()

    def child(self, name: str) -> Child:
        """The child of this name, created if it has no waiting requests. Call `settle` after adding to it."""
        child = self._children.get(name)
        if child is None:
            child = self._children[name] = self._make(max(self._clock, self._ahead.pop(name, 0.0)))
        return child

    def give(self, child: Child, tokens: int) -> None:
        child.given += tokens
        self._advance_clock(tokens)

    def settle(self, name: str, child: Child) -> None:
        """Updates the place of a child that was served, or whose waiting requests have changed."""
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
        if not self._children:  # without waiting children, all restart
            self._clock = 0.0
            self._ahead.clear()
            self._next_caught_up.clear()
        elif given > self._clock:
            self._ahead[name] = given
            heapq.heappush(self._next_caught_up, (given, name))
            if len(self._next_caught_up) > 2 * len(self._ahead) + _FEW:  # most entries are stale
                self._next_caught_up = [(given, name) for name, given in self._ahead.items()]
                heapq.heapify(self._next_caught_up)
        else:
            self._advance_clock(self._clock - given)  # the others were served its share

    def _advance_clock(self, tokens: float) -> None:
        """Advances the clock by tokens that all children share equally."""
        while tokens > 0.0:
            sharing = len(self._children) + len(self._ahead)
            given, name = self._next_caught_up[0] if self._next_caught_up else (math.inf, "")
            if (given - self._clock) * sharing > tokens:
                self._clock += tokens / sharing
                break
            heapq.heappop(self._next_caught_up)
            if self._ahead.get(name) == given:  # it may have returned since
                tokens -= max(given - self._clock, 0.0) * sharing
                self._clock = max(self._clock, given)
                del self._ahead[name]


class Tenant(_Child):
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


class FairQueue:
    """The waiting requests in the fair order: with one flow, or one tenant whose flows have one request each, the order
    of arrival. `key`: order within a flow; `by_flow`: whether the client requests of a tenant share fairly, too; if
    not, a tenant is one flow."""

    def __init__(self, key: Callable[[Request], Key] = _by_arrival, *, by_flow: bool = True) -> None:
        self._key = key
        self._by_flow = by_flow
        self._tenants: Shares[Tenant] = Shares(Tenant)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        name, flow_name = self._names(request)
        tenant = self._tenants.child(name)
        flow = tenant.flows.child(flow_name)
        flow.waiting.add(self._key(request), request)
        self._count += 1
        if flow.place is None or request is flow.head:
            tenant.flows.settle(flow_name, flow)
            self._tenants.settle(name, tenant)

    def remove(self, request: Request, tokens: int = 0) -> None:
        """Removes a request that was served `tokens` tokens: 0 if it leaves without a row."""
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
        """The first `count` requests as of now, in the order in which they would be served if none arrived or left."""
        return _in_turn(self._tenants.order.first(count), count)

    def first_but_of(self, flows: Collection[FlowKey]) -> Request | None:
        """The first request that is not of these flows, or None."""
        for tenant in self._tenants.order.first(len(self._tenants.order)):
            for flow in tenant.flows.order.first(len(flows) + 1):
                if flow.head.flow_key not in flows:
                    return flow.head
        return None


_Served = tuple[float, int, Request, Iterator[Request]]
"""A child that was served: its place, its next request, and its further requests."""


def _in_turn(children: Iterable[_Child], count: int) -> Iterator[Request]:
    """The requests of `children`, which are in order; each request that is yielded moves its child back."""
    served: list[_Served] = []
    for child in children:
        place = child.place
        while served and place is not None and served[0][:2] < place:
            yield _serve(served)
        if len(child) == 1 and isinstance(child, Flow):
            yield child.head
            continue
        given, requests = child.given, child.upcoming(count)
        request = next(requests, None)
        if request is None:  # its requests were removed in the meantime
            continue
        following = next(requests, None)
        if following is not None:
            heapq.heappush(served, (given + request.waiting.cost, following.sequence, following, requests))
        yield request
    while served:
        yield _serve(served)


def _serve(served: list[_Served]) -> Request:
    """Removes the heap's first request, and puts its child's next request there."""
    given, _, request, requests = served[0]
    following = next(requests, None)
    if following is None:
        heapq.heappop(served)
    else:
        heapq.heapreplace(served, (given + request.waiting.cost, following.sequence, following, requests))
    return request
