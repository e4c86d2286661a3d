"""Requests without a row, in the order in which they are to get one."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from sglang_jax.config import SchedulePolicy
from sglang_jax.scheduler.request import Request, RequestState, Waiting
from sglang_jax.scheduler.reserve import CLIP

Key = tuple[int, int, int, int]

_REQUEST = itemgetter(1)

_EMPTY: Any = None
"""In the place of an entry that was taken out."""

LONGEST_PREFIX_WINDOW = 128
"""Requests whose cached prefix is looked up when the longest goes first; a match of the whole queue each step would
cost more than it saves."""


class Turns:
    """Places in one order for the requests of all tenants, so that each has an equal part of the tokens while it waits
    (start-time fair queueing, Goyal, Vin and Cheng 1996). With one tenant it is the order of arrival."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}

    def take(self, tenant: str, tokens: int) -> int:
        """The place of a tenant's next request, for so many tokens: where its last one ends, but not before those whose
        turn it is: who asked for nothing saves nothing up."""
        turn = max(self._now, self._ends.get(tenant, 0))
        self._ends[tenant] = turn + tokens
        return turn

    def pass_to(self, turn: int) -> None:
        """Whose turn it is."""
        self._now = max(self._now, turn)

    def clear(self) -> None:
        """Nobody waits."""
        self._now = 0
        self._ends.clear()


class Order:
    """Requests by a key, lowest first; no two have the same, so that requests are never compared.

    Most that are taken out are the first: their places stay, empty, until they are more than the others.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Request]] = []
        self._begin = 0

    def __len__(self) -> int:
        return len(self._entries) - self._begin

    def add(self, key: Key, request: Request) -> None:
        if not len(self) or self._entries[-1][0] < key:
            self._entries.append((key, request))
        else:
            insort(self._entries, (key, request), self._begin)

    def remove(self, key: Key, request: Request) -> None:
        """Takes out a request that was added with this key."""
        entries, begin = self._entries, self._begin
        place = begin if entries[begin][1] is request else bisect_left(entries, (key,), begin)
        assert entries[place][1] is request
        if place > begin:
            del entries[place]
            return
        entries[begin] = _EMPTY
        self._begin += 1
        if 2 * self._begin > len(entries):
            del entries[: self._begin]
            self._begin = 0

    def first(self, count: int) -> Iterator[Request]:
        """The first `count`, as they are now."""
        return map(_REQUEST, self._entries[self._begin : self._begin + count])


class WaitingQueue:
    """Three orders of the same requests.

    By policy, where arrival is that of turns (`Turns`) if requests are of several tenants:

    - fcfs: order of arrival. lof: longest allowed output first. Ties by arrival.
    - priority: highest first, ties by arrival.
    - lpm: among the first `LONGEST_PREFIX_WINDOW` by arrival, the longest cached prefix first.

    A retracted request stands before all others; under `priority`, before all others of its priority.

    By work (highest priority, then fewest tokens to compute), and by age. No policy but fcfs keeps anyone from being
    overtaken for ever; admission does, by giving every so many turns to the oldest.
    """

    def __init__(self, policy: SchedulePolicy, cached_prefix: Callable[[Request], int]) -> None:
        self._policy = policy
        self._cached_prefix = cached_prefix
        self._by_policy = Order()
        self._by_work = Order()
        self._by_age: list[tuple[int, int, Request]] = []
        self._added = 0
        self._pause = 0
        self._turns = Turns()

    def __len__(self) -> int:
        return len(self._by_policy)

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
        return len(self._by_policy) > 0

    def add(self, request: Request) -> None:
        """Enters a request at its place; a retracted one before its equals."""
        self.look_again()
        work = request.prefill_len - self._cached_prefix(request)
        turn = 0
        if request.state is not RequestState.RETRACTED:
            output = min(request.total_len - request.prefill_len, CLIP)
            turn = self._turns.take(request.tenant, max(work + output, 1))
        request.waiting = Waiting(queued=True, turn=turn, work=work)
        self._by_policy.add(self._key(request), request)
        self._by_work.add(_work_key(request), request)
        self._added += 1
        heapq.heappush(self._by_age, (request.sequence, self._added, request))
        if len(self._by_age) > 2 * len(self) + 64:
            self._by_age = [entry for entry in self._by_age if _waits(entry[2])]
            heapq.heapify(self._by_age)

    def remove(self, request: Request) -> None:
        """Takes a request out; it must be in, in the state in which it came."""
        self.look_again()
        request.waiting.queued = False
        self._turns.pass_to(min(request.waiting.turn, next(self.front(1)).waiting.turn))
        self._by_policy.remove(self._key(request), request)
        self._by_work.remove(_work_key(request), request)
        if not len(self):
            self._turns.clear()

    def first(self, count: int) -> Iterator[Request]:
        """The first `count` requests in the order of the policy, as they are now."""
        if self._policy is not SchedulePolicy.LPM:
            return self.front(count)
        window = list(self.front(max(count, LONGEST_PREFIX_WINDOW)))
        head = window[:LONGEST_PREFIX_WINDOW]
        head.sort(key=self._longest_prefix_key)
        return iter((head + window[LONGEST_PREFIX_WINDOW:])[:count])

    def front(self, count: int) -> Iterator[Request]:
        """As `first`, but for lpm by arrival: nothing is looked up."""
        return self._by_policy.first(count)

    def least_work(self, count: int) -> Iterator[Request]:
        """The first `count` requests by priority and then by work."""
        return self._by_work.first(count)

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
            self._by_work.remove(_work_key(request), request)
            request.waiting.work = work
            self._by_work.add(_work_key(request), request)

    def requests(self) -> list[Request]:
        """Everything that waits."""
        return list(self.front(len(self)))

    def _longest_prefix_key(self, request: Request) -> tuple[int, int]:
        if request.state is RequestState.RETRACTED:
            return (0, 0)
        return (1, -self._cached_prefix(request))

    def _key(self, request: Request) -> Key:
        fresh = int(request.state is not RequestState.RETRACTED)
        match self._policy:
            case SchedulePolicy.LOF:
                return (0, fresh, (request.prompt_len - request.total_len) * fresh, request.sequence)
            case SchedulePolicy.PRIORITY:
                return (-request.priority, fresh, request.waiting.turn, request.sequence)
            case _:
                return (0, fresh, request.waiting.turn, request.sequence)


def _waits(request: Request) -> bool:
    return request.waiting.queued


def _work_key(request: Request) -> Key:
    return (-request.priority, request.waiting.work, request.sequence, 0)
