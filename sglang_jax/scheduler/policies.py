"""Scheduling policies: the order in which waiting requests get rows, apart from the fairness that holds under all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import Protocol

from sglang_jax.config import SchedulePolicy
from sglang_jax.queues.fair_queue import FairQueue, FlowKey
from sglang_jax.queues.order import Key
from sglang_jax.scheduler.request import Request, RequestState

LONGEST_PREFIX_WINDOW = 128
"""Requests whose cached prefix the policy lpm looks up: the whole queue in each step would cost more than it saves."""

RANKED_NODES = 1024
"""Nodes of the tree that a look may visit to find the longest prefix, not counting those of its last prompt."""

_ARRIVAL = attrgetter("sequence")
_COST = attrgetter("waiting.cost")  # called for each request of a look; so these are faster than functions


def fair_order() -> FairQueue[Request]:
    """Tenants share fairly, and so do the client requests of each: with one client request, or if each has one prompt
    and one tenant sends them all, the order of arrival."""
    return FairQueue(attrgetter("flow_key"), _ARRIVAL, _COST, key=lambda request: (request.sequence,))


def longest_output_first() -> FairQueue[Request]:
    """Tenants share fairly; of each, the longest allowed output is first, ties by arrival."""
    return FairQueue(_tenant_only, _ARRIVAL, _COST, key=_output_key)


class Policy(Protocol):
    """An order of waiting requests. Under all policies, tenants share fairly: a policy orders only requests of the same
    tenant. No policy prevents starvation; admission does, by admitting the oldest request at intervals.

    - `uses_fair_order`: whether the order within a priority is the fair one.
    - `by_priority`: whether requests of a higher priority go first; otherwise all have one priority.
    """

    @property
    def uses_fair_order(self) -> bool: ...

    @property
    def by_priority(self) -> bool: ...

    @property
    def order(self) -> Callable[[], FairQueue[Request]]:
        """Makes a queue of requests of one priority: `fair_order`, or one of another order."""
        ...

    def first(self, front: Callable[[int], Iterator[Request]], count: int) -> Iterator[Request]:
        """Returns the first `count` requests, as of now. `front(n)`: the first n, retracted ones first, in the orders
        of `order`."""
        ...


class FairOrder(Policy):
    """fcfs: the fair order. priority: highest first; within a priority, the fair order."""

    order = staticmethod(fair_order)
    uses_fair_order = True
    by_priority = False

    def __init__(self, *, by_priority: bool = False) -> None:
        self.by_priority = by_priority

    def first(self, front: Callable[[int], Iterator[Request]], count: int) -> Iterator[Request]:
        return front(count)


class LongestOutputFirst(Policy):
    """lof: the longest allowed output of each tenant first, ties by arrival."""

    order = staticmethod(longest_output_first)
    uses_fair_order = False
    by_priority = False

    def first(self, front: Callable[[int], Iterator[Request]], count: int) -> Iterator[Request]:
        return front(count)


class LongestPrefixFirst(Policy):
    """lpm: among the first `LONGEST_PREFIX_WINDOW` in the fair order, the longest cached prefix of each tenant first.
    `cached_prefix`: looks up a request's cached length, and updates its bookmark."""

    order = staticmethod(fair_order)
    uses_fair_order = False
    by_priority = False

    def __init__(self, cached_prefix: Callable[[Request], int]) -> None:
        self._cached_prefix = cached_prefix

    def first(self, front: Callable[[int], Iterator[Request]], count: int) -> Iterator[Request]:
        every = front(max(count, LONGEST_PREFIX_WINDOW))
        window = self._longest_prefix_first(list(islice(every, LONGEST_PREFIX_WINDOW)))
        return islice(chain(window, every), count)

    def _longest_prefix_first(self, window: list[Request]) -> Iterator[Request]:
        """Gives the places of each tenant's requests to those with the longest prefix first."""
        retracted = sum([request.state is RequestState.RETRACTED for request in window])  # these are first
        by_tenant: dict[str, list[Request]] = defaultdict(list)
        for request in window[retracted:]:
            by_tenant[request.flow_key[0]].append(request)
        lengths = self._look_up(window[retracted:])
        order = {
            tenant: iter(sorted(requests, key=lengths.__getitem__, reverse=True))
            for tenant, requests in by_tenant.items()
        }
        rest = [next(order[request.flow_key[0]]) for request in window[retracted:]]
        return chain(window[:retracted], rest)

    def _look_up(self, window: list[Request]) -> dict[Request, int]:
        """The cached length of each request. Requests with the fewest visited nodes are looked up first; after
        `RANKED_NODES` nodes, the others keep their last known length."""
        lengths, left = {}, RANKED_NODES
        for request in sorted(window, key=_visited):
            before = _visited(request)
            lengths[request] = request.waiting.bookmark.length if left <= 0 else self._cached_prefix(request)
            left -= _visited(request) - before
        return lengths


def create_policy(policy: SchedulePolicy, cached_prefix: Callable[[Request], int]) -> Policy:
    """Returns the policy of this name. `cached_prefix`: as of `LongestPrefixFirst`."""
    match policy:
        case SchedulePolicy.FCFS:
            return FairOrder()
        case SchedulePolicy.PRIORITY:
            return FairOrder(by_priority=True)
        case SchedulePolicy.LPM:
            return LongestPrefixFirst(cached_prefix)
        case SchedulePolicy.LOF:
            return LongestOutputFirst()


def _visited(request: Request) -> int:
    return request.waiting.bookmark.visited


def _tenant_only(request: Request) -> FlowKey:
    return (request.flow_key[0], "")


def _output_key(request: Request) -> Key:
    return (request.prompt_len - request.total_len, request.sequence)
