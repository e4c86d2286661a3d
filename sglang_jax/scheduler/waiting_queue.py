"""Requests without a row, in the order in which they are to get one."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice

from sglang_jax.config import SchedulePolicy
from sglang_jax.scheduler.order import Key, Order
from sglang_jax.scheduler.request import FlowKey, Request, RequestState, Waiting
from sglang_jax.scheduler.reserve import CLIP
from sglang_jax.scheduler.turns import Turns

LONGEST_PREFIX_WINDOW = 128
"""Requests whose cached prefix is looked up when the longest goes first; a match of the whole queue each step would
cost more than it saves."""

RANKED_NODES = 1024
"""Nodes of the tree that a look visits to find the longest prefix, beside those of the last prompt."""


class ByTurn:
    """Requests of each priority by turns (`make` makes those of one), and the retracted ones of this priority before
    them."""

    def __init__(self, make: Callable[[], Turns] = Turns) -> None:
        self._make = make
        self._retracted: dict[int, Order[Request]] = {}
        self._turns: dict[int, Turns] = {}
        self._priorities: list[int] = []

    def add(self, priority: int, request: Request) -> None:
        if priority not in self._turns:
            self._retracted[priority], self._turns[priority] = Order(), self._make()
            insort(self._priorities, -priority)
        if request.state is RequestState.RETRACTED:
            self._retracted[priority].add((request.sequence,), request)
        else:
            self._turns[priority].add(request)

    def remove(self, priority: int, request: Request, tokens: int) -> None:
        """It was given so many tokens, or none, as it left."""
        retracted, turns = self._retracted[priority], self._turns[priority]
        if request.state is RequestState.RETRACTED:
            retracted.remove((request.sequence,), request)
        else:
            turns.remove(request, tokens)
        if not retracted and not turns:
            del self._retracted[priority], self._turns[priority]
            self._priorities.remove(-priority)

    def first(self, count: int) -> Iterator[Request]:
        """The first `count`, as they are now."""
        if len(self._priorities) == 1:
            return self._first_of(-self._priorities[0], count)
        return islice(self._first_of_each(count), count)

    def first_but_of(self, flows: Collection[FlowKey]) -> Request | None:
        """The first that was not retracted, and is of none of these flows; None if there is nobody."""
        every = (self._turns[-priority].first_but_of(flows) for priority in self._priorities)
        return next((request for request in every if request is not None), None)

    def _first_of_each(self, count: int) -> Iterator[Request]:
        """Priority by priority, each looked at once the ones before it are through: clients choose how many there
        are."""
        for negative in self._priorities[:count]:
            if -negative in self._turns:  # a look may have taken its last request out meanwhile
                yield from self._first_of(-negative, count)

    def _first_of(self, priority: int, count: int) -> Iterator[Request]:
        retracted, turns = self._retracted[priority], self._turns[priority]
        if not retracted:
            return islice(turns.first(count), count)
        return islice(chain(retracted.first(count), turns.first(count)), count)


class WaitingQueue:
    """Orders of the same requests.

    By turns (`Turns`), which is the order of arrival where clients send one prompt at a time, and by policy:

    - fcfs: turns. priority: highest first, those of one priority by turns.
    - lpm: among the first `LONGEST_PREFIX_WINDOW` by turns, the longest cached prefix of a tenant first.
    - lof: longest allowed output of a tenant first, ties by arrival.

    Under all of them tenants have turns: what a policy prefers goes before other requests of its tenant alone.

    A retracted request stands before all others; under `priority`, before all others of its priority.

    By work (fewest tokens to compute), by priority and then work, and by age. No policy keeps anyone from being
    overtaken for ever; admission does, by giving every so many turns to the oldest.
    """

    def __init__(self, policy: SchedulePolicy, cached_prefix: Callable[[Request], int]) -> None:
        self._policy = policy
        self._cached_prefix = cached_prefix
        self._by_turn = self._by_policy = ByTurn()
        if policy is SchedulePolicy.LOF:
            self._by_policy = ByTurn(lambda: Turns(_output_key, by_flow=False))
        self._regardless = ByTurn() if policy is SchedulePolicy.PRIORITY else self._by_turn
        self._by_priority: Order[Request] = Order()
        self._by_work = self._by_priority  # the same while all that wait have one priority
        self._by_age: list[tuple[int, int, Request]] = []
        self._added = 0
        self._pause = 0

    def __len__(self) -> int:
        return len(self._by_priority)

    @property
    def minds_turns(self) -> bool:
        """Whether the policy's own order is that of turns, within a priority."""
        return self._policy in (SchedulePolicy.FCFS, SchedulePolicy.PRIORITY)

    def look_again(self) -> None:
        """Something was released, cached or queued: who does not fit may fit now."""
        self._pause = 0

    def pause(self, steps: int) -> None:
        """Nobody fits: looking again is not worth the while for so many steps, unless something changes."""
        self._pause = steps

    def worth_a_look(self) -> bool:
        """Whether anybody waits and may fit; asked once a step."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return len(self._by_priority) > 0

    def add(self, request: Request) -> None:
        """Enters a request at its place; a retracted one before its equals."""
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
        """Takes a request out that leaves; it must be in, in the state in which it came."""
        self._take_out(request, 0)

    def seat(self, request: Request) -> None:
        """Takes a request out whose turn it is."""
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
        """The first `count` requests in the order of the policy, as they are now."""
        if self._policy is not SchedulePolicy.LPM:
            return self.front(count)
        every = self.front(max(count, LONGEST_PREFIX_WINDOW))
        window = self._longest_prefix_first(list(islice(every, LONGEST_PREFIX_WINDOW)))
        return islice(chain(window, every), count)

    def _longest_prefix_first(self, window: list[Request]) -> Iterator[Request]:
        """The places that requests of a tenant have by turns go to those of its requests with the longest prefix."""
        retracted = sum([request.state is RequestState.RETRACTED for request in window])  # before all others
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
        """The cached prefix of each, those first for which least was visited. Once `RANKED_NODES` were visited, what
        was found last stands for the others."""
        lengths, left = {}, RANKED_NODES
        for request in sorted(window, key=_visited):
            before = _visited(request)
            lengths[request] = request.waiting.bookmark.length if left <= 0 else self._cached_prefix(request)
            left -= _visited(request) - before
        return lengths

    def front(self, count: int) -> Iterator[Request]:
        """As `first`, but for lpm by turns: nothing is looked up."""
        return self._by_policy.first(count)

    def next_turn(self) -> Request:
        """Whose turn it is, whatever the policy prefers and whatever its priority. The queue must not be empty."""
        return next(self._regardless.first(1))

    def passes(self, request: Request, waiting: Request) -> bool:
        """Whether one that goes before another, whose turn it is, is of another tenant, or goes by its priority."""
        by_priority = self._policy is SchedulePolicy.PRIORITY and request.priority > waiting.priority
        return by_priority or request.flow_key[0] != waiting.flow_key[0]

    def guest(self, flows: Collection[FlowKey]) -> Request | None:
        """The first by turns that is of none of these flows; None if there is nobody."""
        return self._by_turn.first_but_of(flows)

    def least_work(self, count: int, *, by_priority: bool) -> Iterator[Request]:
        """The first `count` requests by work, those of higher priority before all others if asked for."""
        return (self._by_priority if by_priority else self._by_work).first(count)

    def oldest(self) -> Request:
        """The one that arrived first. The queue must not be empty."""
        while True:
            request = self._by_age[0][2]
            if _waits(request):
                return request
            heapq.heappop(self._by_age)

    def update_work(self, request: Request) -> None:
        """Finds how many tokens of a waiting request are to be computed as things are now."""
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
        """Everything that waits."""
        return list(self.front(len(self)))

    def _priority(self, request: Request) -> int:
        """Under which turns are had: its own, where the policy looks at priorities."""
        return request.priority if self._policy is SchedulePolicy.PRIORITY else 0


def _visited(request: Request) -> int:
    return request.waiting.bookmark.visited


def _waits(request: Request) -> bool:
    return request.waiting.queued


def _output_key(request: Request) -> Key:
    return (request.prompt_len - request.total_len, request.sequence)
