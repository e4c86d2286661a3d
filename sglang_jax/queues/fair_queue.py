"""A queue in which tenants get equal shares, and so do the *flows* of each tenant: its client requests, with any number
of items.

On both levels, the child with the lowest rank is next. By start, the rank is what a child was charged (start-time fair
queueing, Goyal, Vin and Cheng 1996): a newcomer with a large item does not wait until others were charged as much. By
finish, the size of its next item is added (self-clocked fair queueing, Golestani 1994): a newcomer with a small item
precedes the large ones of others.

A newcomer starts at a clock, which is at least the lowest rank. By start, that would stand still while newcomers come,
and a flow that was served once would wait until none do. So each charge also advances the clock by an equal share of
it, as if all children were served at once (Parekh and Gallager 1993), but at most to one charge above the lowest rank:
no child that waits is further behind a newcomer.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from sglang_jax.queues.order import Item, Key, Order

FlowKey = tuple[str, str]
"""A tenant, and which of its client requests something is part of."""

Place = tuple[float, float]
"""A child's rank, and the arrival of its next item; the child with the lowest place is next."""

_LAST: Place = (math.inf, 0.0)
_END = (None,)
_FEW = 64


@dataclass(frozen=True, slots=True)
class _Rule(Generic[Item]):
    arrival: Callable[[Item], float]
    cost: Callable[[Item], float]
    by_finish: bool


class _Child(ABC, Generic[Item]):
    """A tenant or a flow. `given`: what it was charged, at least the clock at its arrival; `place`: in the order, None
    while nothing of it waits."""

    def __init__(self, given: float) -> None:
        self.given = given
        self.place: Place | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Number of its waiting items, or of its flows that have any."""

    @property
    @abstractmethod
    def head(self) -> Item:
        """Its next item."""

    @abstractmethod
    def upcoming(self, count: int) -> Iterator[Item]:
        """Its next `count` items, as of now."""


class Flow(_Child[Item]):
    """The waiting items of a flow, by key."""

    def __init__(self, given: float) -> None:
        super().__init__(given)
        self.waiting: Order[Item] = Order()

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def head(self) -> Item:
        return self.waiting.head()

    def upcoming(self, count: int) -> Iterator[Item]:
        return self.waiting.first(count)


Child = TypeVar("Child", bound=_Child[Any])


class Shares(Generic[Child]):
    """Children that get equal shares while they wait. One that leaves ahead of the clock is remembered until the clock
    has caught up: it gains nothing by returning before that, and saves nothing up while idle."""

    def __init__(self, make: Callable[[float], Child], rule: _Rule[Any]) -> None:
        self._make = make
        self._rule = rule
        self._clock = 0.0
        self._ahead: dict[str, float] = {}
        self._max_ahead = _FEW
        self.children: dict[str, Child] = {}
        self.order: Order[Child] = Order()

    def child(self, name: str) -> Child:
        """The child of this name, created if nothing of it waits. Call `settle` after adding to it."""
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = self._make(max(self._clock, self._ahead.pop(name, 0.0)))
        return child

    def charge(self, name: str, amount: float) -> None:
        """Charges a child. If it waits, call `settle` afterwards."""
        if not self.children:
            return
        child, lowest = self.children.get(name), self.order.lowest()[0]
        if child is None:
            given = max(self._clock, self._ahead.get(name, 0.0))
            lowest = min(lowest, given)
            self._depart(name, given + amount)
        else:
            child.given += amount
        self._advance(lowest, amount / (len(self.children) + (child is None)), amount)

    def _advance(self, lowest: float, share: float, amount: float) -> None:
        if self._clock < lowest:
            self._clock = lowest
        if not self._rule.by_finish and self._clock < lowest + amount:
            self._clock = min(self._clock + share, lowest + amount)

    def upcoming(self, count: int) -> Iterator[Any]:
        """The next `count` items of all children, as of now."""
        if len(self.children) == 1:
            return self.order.head().upcoming(count)
        return _in_turn(self.order.first(count), count, self._rule)

    def settle(self, name: str, child: Child) -> None:
        """Updates the place of a child that was charged, or whose waiting items have changed."""
        if child.place is not None:
            self.order.remove(child.place, child)
            child.place = None
        if len(child):
            head, rule = child.head, self._rule
            rank = child.given + rule.cost(head) if rule.by_finish else child.given
            child.place = (rank, rule.arrival(head))
            self.order.add(child.place, child)
        else:
            del self.children[name]
            self._depart(name, child.given)

    def _depart(self, name: str, given: float) -> None:
        if not self.children:  # all restart
            self._clock, self._max_ahead = 0.0, _FEW
            self._ahead.clear()
        elif given > self._clock:
            self._ahead[name] = given
            if len(self._ahead) > self._max_ahead:
                self._ahead = {name: given for name, given in self._ahead.items() if given > self._clock}
                self._max_ahead = 2 * len(self._ahead) + _FEW


class _Tenant(_Child[Item]):
    def __init__(self, given: float, rule: _Rule[Item]) -> None:
        super().__init__(given)
        self.flows: Shares[Flow[Item]] = Shares(Flow, rule)

    def __len__(self) -> int:
        return len(self.flows.children)

    @property
    def head(self) -> Item:
        return self.flows.order.head().head

    def upcoming(self, count: int) -> Iterator[Item]:
        return self.flows.upcoming(count)


class FairQueue(Generic[Item]):
    """Waiting items in the fair order.

    - `flow_of`: an item's flow; `arrival`: its number in the order of arrival, which breaks ties.
    - `cost`: what it is expected to be charged. An order by start announces later items by it; `by_finish` needs it.
    - `key`: orders the items of a flow.
    """

    def __init__(
        self,
        flow_of: Callable[[Item], FlowKey],
        arrival: Callable[[Item], float],
        cost: Callable[[Item], float],
        *,
        key: Callable[[Item], Key],
        by_finish: bool = False,
    ) -> None:
        self._flow_of = flow_of
        self._key = key
        self._rule = rule = _Rule(arrival, cost, by_finish)
        self._tenants: Shares[_Tenant[Item]] = Shares(lambda given: _Tenant(given, rule), rule)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item) -> None:
        name, flow_name = self._flow_of(item)
        tenant = self._tenants.child(name)
        flow = tenant.flows.child(flow_name)
        flow.waiting.add(self._key(item), item)
        self._count += 1
        if flow.place is None or item is flow.head:
            tenant.flows.settle(flow_name, flow)
            self._tenants.settle(name, tenant)

    def remove(self, item: Item, charge: float = 0.0) -> None:
        """Removes an item; `charge`: 0 if it was not served, or is charged later."""
        name, flow_name = self._flow_of(item)
        tenant = self._tenants.child(name)
        flow = tenant.flows.child(flow_name)
        if charge:
            tenant.flows.charge(flow_name, charge)
            self._tenants.charge(name, charge)
        flow.waiting.remove(self._key(item), item)
        self._count -= 1
        tenant.flows.settle(flow_name, flow)
        self._tenants.settle(name, tenant)

    def charge(self, flow_key: FlowKey, amount: float) -> None:
        """Charges a flow for an item that was removed."""
        name, flow_name = flow_key
        self._tenants.charge(name, amount)
        tenant = self._tenants.children.get(name)
        if tenant is None:
            return
        tenant.flows.charge(flow_name, amount)
        flow = tenant.flows.children.get(flow_name)
        if flow is not None:
            tenant.flows.settle(flow_name, flow)
        self._tenants.settle(name, tenant)

    def head(self) -> Item:
        """The next item. The queue must not be empty."""
        return self._tenants.order.head().head

    def first(self, count: int) -> Iterator[Item]:
        """The first `count` items as of now, in the order in which they would be served if none arrived or left."""
        return self._tenants.upcoming(count)

    def heads(self, count: int) -> Iterator[Item]:
        """The next item of the first `count` flows of each tenant, tenant by tenant."""
        for tenant in self._tenants.order.first(len(self._tenants.order)):
            for flow in tenant.flows.order.first(count):
                yield flow.head


def _in_turn(children: Iterable[_Child[Item]], count: int, rule: _Rule[Item]) -> Iterator[Item]:
    """The items of `children`, which are in order; each item that is yielded moves its child back."""
    arrival, cost, by_finish = rule.arrival, rule.cost, rule.by_finish
    # Children that were served: their place, what they were charged, their next item, and their further items.
    served: list[tuple[float, float, float, Item, Iterator[Item]]] = []
    for child in chain(children, _END):
        place = child.place if child is not None else _LAST
        while served and place is not None and served[0] < place:
            _, _, given, item, items = served[0]
            following = next(items, None)
            if following is None:
                heapq.heappop(served)
            else:
                given += cost(item)
                rank = given + cost(following) if by_finish else given
                heapq.heapreplace(served, (rank, arrival(following), given, following, items))
            yield item
        if child is None:
            return
        if len(child) == 1 and isinstance(child, Flow):
            yield child.head
            continue
        items = child.upcoming(count)
        first = next(items, None)
        if first is None:  # its items were removed in the meantime
            continue
        following = next(items, None)
        if following is not None:
            given = child.given + cost(first)
            rank = given + cost(following) if by_finish else given
            heapq.heappush(served, (rank, arrival(following), given, following, items))
        yield first
