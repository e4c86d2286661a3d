"""The queue of requests without a row, in several orders."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice

from sglang_jax.queues.fair_queue import FairQueue, FlowKey
from sglang_jax.queues.order import Order
from sglang_jax.scheduler.policies import Policy, fair_order
from sglang_jax.scheduler.request import Request, RequestState, Waiting
from sglang_jax.scheduler.reserve import CLIP


class PriorityQueue:
    """Requests by priority; within one, the retracted ones first, then the others in the fair order that `make`
    creates."""

    def __init__(self, make: Callable[[], FairQueue[Request]] = fair_order) -> None:
        self._make = make
        self._retracted: dict[int, Order[Request]] = {}
        self._fair: dict[int, FairQueue[Request]] = {}
        self._priorities: list[int] = []

    def add(self, priority: int, request: Request) -> None:
        if priority not in self._fair:
            self._retracted[priority], self._fair[priority] = Order(), self._make()
            insort(self._priorities, -priority)
        if request.state is RequestState.RETRACTED:
            self._retracted[priority].add((request.sequence,), request)
        else:
            self._fair[priority].add(request)

    def remove(self, priority: int, request: Request, tokens: int) -> None:
        """Removes a request that was served `tokens` tokens: 0 if it leaves without a row."""
        retracted, fair = self._retracted[priority], self._fair[priority]
        if request.state is RequestState.RETRACTED:
            retracted.remove((request.sequence,), request)
        else:
            fair.remove(request, tokens)
        if not retracted and not fair:
            del self._retracted[priority], self._fair[priority]
            self._priorities.remove(-priority)

    def head(self) -> Request:
        """The first request. The queue must not be empty."""
        priority = -self._priorities[0]
        return self._retracted[priority].head() if self._retracted[priority] else self._fair[priority].head()

    def first(self, count: int) -> Iterator[Request]:
        """The first `count` requests, as of now."""
        if len(self._priorities) == 1:
            return self._first_of(-self._priorities[0], count)
        return islice(self._first_of_each(count), count)

    def first_but_of(self, flows: Collection[FlowKey]) -> Request | None:
        """The first request that was not retracted and is not of these flows, or None."""
        heads = chain.from_iterable(self._fair[-priority].heads(len(flows) + 1) for priority in self._priorities)
        return next((request for request in heads if request.flow_key not in flows), None)

    def _first_of_each(self, count: int) -> Iterator[Request]:
        """Visits a priority only when the higher ones are exhausted, since clients choose how many there are."""
        for negative in self._priorities[:count]:
            if -negative in self._fair:  # a look may have removed its last request
                yield from self._first_of(-negative, count)

    def _first_of(self, priority: int, count: int) -> Iterator[Request]:
        retracted, fair = self._retracted[priority], self._fair[priority]
        if not retracted:
            return islice(fair.first(count), count)
        return islice(chain(retracted.first(count), fair.first(count)), count)


class WaitingQueue:
    """The waiting requests in five orders: fair (`FairQueue`), by policy, by work (fewest tokens to compute first), by
    priority and then work, and by age. A retracted request is before all others; if the policy is by priority, before
    all others of its priority. `cached_prefix`: looks up a request's cached length, and updates its bookmark."""

    def __init__(self, policy: Policy, cached_prefix: Callable[[Request], int]) -> None:
        self.policy = policy
        self._cached_prefix = cached_prefix
        self._by_turn = self._by_policy = PriorityQueue()
        if policy.order is not fair_order:
            self._by_policy = PriorityQueue(policy.order)
        self._regardless = PriorityQueue() if policy.by_priority else self._by_turn
        self._by_priority: Order[Request] = Order()
        self._by_work = self._by_priority  # the same while all requests have one priority
        self._by_age: list[tuple[int, int, Request]] = []
        self._added = 0
        self._pause = 0

    def __len__(self) -> int:
        return len(self._by_priority)

    def look_again(self) -> None:
        """Notes a release, an insertion or an arrival: requests that did not fit may fit now."""
        self._pause = 0

    def pause(self, steps: int) -> None:
        """No request fits: skips looks for `steps` steps, unless something changes."""
        self._pause = steps

    def worth_a_look(self) -> bool:
        """Whether requests wait that may fit. To be called once per step."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return len(self._by_priority) > 0

    def add(self, request: Request) -> None:
        self.look_again()
        work = request.prefill_len - self._cached_prefix(request)
        cost = 0
        if request.state is not RequestState.RETRACTED:
            cost = max(work + min(request.total_len - request.prefill_len, CLIP), 1)
        request.waiting = Waiting(queued=True, cost=cost, work=work, bookmark=request.waiting.bookmark)
        self._by_turn.add(self._priority(request), request)
        if self._by_policy is not self._by_turn:
            self._by_policy.add(self._priority(request), request)
        if self._regardless is not self._by_turn:
            self._regardless.add(0, request)
        self._add_by_work(request)
        self._added += 1
        heapq.heappush(self._by_age, (request.sequence, self._added, request))
        if len(self._by_age) > 2 * len(self) + 64:
            self._by_age = [entry for entry in self._by_age if _waits(entry[2])]
            heapq.heapify(self._by_age)

    def remove(self, request: Request) -> None:
        """Removes a request that leaves without a row. Its state must be the one in which it was added."""
        self._take_out(request, 0)

    def seat(self, request: Request) -> None:
        """Removes a request that gets a row."""
        self._take_out(request, request.waiting.cost)

    def _take_out(self, request: Request, tokens: int) -> None:
        self.look_again()
        request.waiting.queued = False
        self._by_turn.remove(self._priority(request), request, tokens)
        if self._by_policy is not self._by_turn:
            self._by_policy.remove(self._priority(request), request, tokens)
        if self._regardless is not self._by_turn:
            self._regardless.remove(0, request, tokens)
        self._remove_by_work(request)

    def first(self, count: int) -> Iterator[Request]:
        """The first `count` requests in the order of the policy, as of now."""
        return self.policy.first(self.front, count)

    def front(self, count: int) -> Iterator[Request]:
        """Like `first`, but in the fair order for lpm, without looking up prefixes."""
        return self._by_policy.first(count)

    def next_turn(self) -> Request:
        """The first in the fair order, regardless of policy and priority. The queue must not be empty."""
        return self._regardless.head()

    def passes(self, request: Request, waiting: Request) -> bool:
        """Whether `request`, of another tenant or a higher priority, would overtake `waiting`, the first in the fair
        order."""
        by_priority = self.policy.by_priority and request.priority > waiting.priority
        return by_priority or request.flow_key[0] != waiting.flow_key[0]

    def guest(self, flows: Collection[FlowKey]) -> Request | None:
        """The first request in the fair order that is not of these flows, or None."""
        return self._by_turn.first_but_of(flows)

    def least_work(self, count: int, *, by_priority: bool) -> Iterator[Request]:
        """The first `count` requests by work, or by priority and then work."""
        return (self._by_priority if by_priority else self._by_work).first(count)

    def oldest(self) -> Request:
        """The request that arrived first. The queue must not be empty."""
        while True:
            request = self._by_age[0][2]
            if _waits(request):
                return request
            heapq.heappop(self._by_age)

    def update_work(self, request: Request) -> None:
        work = request.prefill_len - self._cached_prefix(request)
        if work != request.waiting.work:
            self._remove_by_work(request)
            request.waiting.work = work
            self._add_by_work(request)

    def _add_by_work(self, request: Request) -> None:
        key = (request.waiting.work, request.sequence)
        if not self._by_priority:
            self._by_work = self._by_priority
        elif self._by_work is self._by_priority and request.priority != self._by_work.head().priority:
            self._by_work = Order()
            for each in self._by_priority.first(len(self)):
                self._by_work.add((each.waiting.work, each.sequence), each)
        self._by_priority.add((-request.priority, *key), request)
        if self._by_work is not self._by_priority:
            self._by_work.add(key, request)

    def _remove_by_work(self, request: Request) -> None:
        key = (request.waiting.work, request.sequence)
        self._by_priority.remove((-request.priority, *key), request)
        if self._by_work is not self._by_priority:
            self._by_work.remove(key, request)

    def requests(self) -> list[Request]:
        return list(self.front(len(self)))

    def _priority(self, request: Request) -> int:
        return request.priority if self.policy.by_priority else 0


class Queues:
    """The queue of requests whose clients wait, `others`, and that of the `background`."""

    def __init__(self, others: WaitingQueue, background: WaitingQueue) -> None:
        self._others = others
        self._background = background

    def __len__(self) -> int:
        return len(self._others) + len(self._background)

    def add(self, request: Request) -> None:
        self._of(request).add(request)

    def remove(self, request: Request) -> None:
        """See `WaitingQueue.remove`."""
        self._of(request).remove(request)

    def look_again(self) -> None:
        """See `WaitingQueue.look_again`."""
        self._others.look_again()
        self._background.look_again()

    def _of(self, request: Request) -> WaitingQueue:
        return self._background if request.background else self._others


def _waits(request: Request) -> bool:
    return request.waiting.queued
