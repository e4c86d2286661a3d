"""Requests without a row, in the order in which they are to get one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from sglang_jax.config import SchedulePolicy
from sglang_jax.scheduler.request import Request, RequestState

Key = tuple[int, int, int]

LONGEST_PREFIX_WINDOW = 128
"""Requests whose cached prefix is looked up when the longest goes first; a match of the whole queue each step would
cost more than it saves."""


class WaitingQueue:
    """Sorted by policy; retracted requests stand before all others, oldest first.

    - fcfs: order of arrival. lof: longest allowed output first. priority: highest first. Ties by arrival.
    - lpm: among the first `LONGEST_PREFIX_WINDOW` by arrival, the longest cached prefix first.
    """

    def __init__(self, policy: SchedulePolicy, cached_prefix: Callable[[Request], int]) -> None:
        self._policy = policy
        self._cached_prefix = cached_prefix
        self._entries: list[tuple[Key, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Enters a request at its place; a retracted one at the head."""
        insort(self._entries, (self._key(request), request), key=lambda entry: entry[0])

    def remove(self, request: Request) -> None:
        """Takes a request out; it must be in, in the state in which it came."""
        index = bisect_left(self._entries, self._key(request), key=lambda entry: entry[0])
        assert self._entries[index][1] is request
        del self._entries[index]

    def first(self, count: int) -> list[Request]:
        """The first `count` requests in the order of admission."""
        if self._policy is not SchedulePolicy.LPM:
            return [request for _, request in self._entries[:count]]
        window = [request for _, request in self._entries[: max(count, LONGEST_PREFIX_WINDOW)]]
        head = window[:LONGEST_PREFIX_WINDOW]
        head.sort(key=self._longest_prefix_key)
        return (head + window[LONGEST_PREFIX_WINDOW:])[:count]

    def requests(self) -> list[Request]:
        """Everything that waits."""
        return [request for _, request in self._entries]

    def _longest_prefix_key(self, request: Request) -> tuple[int, int]:
        if request.state is RequestState.RETRACTED:
            return (0, 0)
        return (1, -self._cached_prefix(request))

    def _key(self, request: Request) -> Key:
        if request.state is RequestState.RETRACTED:
            return (0, 0, request.sequence)
        match self._policy:
            case SchedulePolicy.LOF:
                return (1, request.prompt_len - request.total_len, request.sequence)
            case SchedulePolicy.PRIORITY:
                return (1, -request.priority, request.sequence)
            case _:
                return (1, 0, request.sequence)
